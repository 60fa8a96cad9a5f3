"""Parts of a Lightning trainer that this project replaces."""

import lightning as L
from lightning.fabric.plugins.io import TorchCheckpointIO

from zoo.checkpoints.format import AtomicCheckpointIO
from zoo.train.lightning_internals import replace_signal_connector
from zoo.train.signal_connector import Signals


def install(trainer: L.Trainer) -> None:
    """Make a trainer use `AtomicCheckpointIO` and `Signals`, in place of Lightning's defaults.

    A checkpoint IO or signal connector that was chosen explicitly stays.
    """
    write_whole(trainer)
    replace_signal_connector(trainer, Signals)


def write_whole(trainer: L.Trainer) -> None:
    """Make a trainer write its checkpoints by `AtomicCheckpointIO`, with a hash, unless another way was chosen."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
