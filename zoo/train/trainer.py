"""Parts of a Lightning trainer that this project replaces."""

import lightning as L
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from zoo.checkpoints.format import AtomicCheckpointIO
from zoo.train.signal_connector import Signals


def install(trainer: L.Trainer) -> None:
    """Make a trainer use `AtomicCheckpointIO` and `Signals`, in place of Lightning's defaults.

    A checkpoint IO or signal connector that was chosen explicitly stays.
    """
    write_whole(trainer)
    if type(trainer._signal_connector) is _SignalConnector:
        trainer._signal_connector = Signals(trainer)


def write_whole(trainer: L.Trainer) -> None:
    """Make a trainer write its checkpoints by `AtomicCheckpointIO`, with a hash, unless another way was chosen."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
