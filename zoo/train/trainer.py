"""Parts of a Lightning trainer that this project replaces: its signal handlers, and how it writes checkpoints."""

import os
import signal
from contextlib import suppress
from types import FrameType

import lightning as L
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zoo.checkpoints.io import AtomicCheckpointIO
from zoo.train.lightning_internals import SignalConnector, replace_signal_connector
from zoo.train.signals import STOP_SIGNALS


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


class Signals(SignalConnector):
    """Handlers of Ctrl-C, SIGTERM and SIGHUP while a trainer runs.

    (Lightning's handler of SIGTERM waits for the other processes; these may wait for this one, and then all hang.)

    While `noted` is set, a handler only stores the first signal in `wish`, which the `Checkpoints` callback reads
    between two steps; a second Ctrl-C stops immediately. Otherwise, as in an evaluation, signals raise an exception.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self.noted = False
        self.wish: int | None = None
        self._process = os.getpid()

    def register_signal_handlers(self) -> None:
        """Install the handlers, except for signals that are ignored (SIGHUP under nohup)."""
        super().register_signal_handlers()
        self.wish, self._process = None, os.getpid()
        for number in STOP_SIGNALS:
            if number == signal.SIGINT or not self.was_ignored(number):
                self.handle(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked data worker: the parent decides
        if self.noted and (self.wish is None or number != signal.SIGINT):
            first, self.wish = self.wish is None, self.wish or number
            if first:
                hint = "; Ctrl-C again stops immediately, without saving" if number == signal.SIGINT else ""
                with suppress(OSError):  # the terminal may have hung up
                    # print is not safe in a handler
                    os.write(2, f"\nStopping when this step is done and saved{hint}.\n".encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise ended_by(number)

    def end(self, number: int) -> BaseException:
        """The exception that ends the run because of a signal, received by this or another process."""
        if number == signal.SIGINT:
            return KeyboardInterrupt()
        self.received_sigterm = True
        return ended_by(number)


def ended_by(number: int) -> SIGTERMException:
    """The exception with the exit code that a scheduler expects; Lightning's default exit code means success."""
    error = SIGTERMException()
    error.code = 128 + number
    return error
