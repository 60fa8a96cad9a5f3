"""What is installed in a Lightning trainer besides callbacks."""

import lightning as L
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from zoo.checkpoints.io import AtomicCheckpointIO
from zoo.train.signals import Signals


def install(trainer: L.Trainer) -> None:
    """Let a trainer read and write checkpoints by `AtomicCheckpointIO`, unless somebody chose another way.

    Signals are then those of `Signals`, too.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    if type(trainer._signal_connector) is _SignalConnector:
        trainer._signal_connector = Signals(trainer)
