"""Signals that ask a process to end: what a run does about them, and processes that end with the one that started them.

`Signals` takes the place of Lightning's own connector (tried with Lightning 2.6): its handler of SIGTERM waits for the
other processes inside the handler, and these may be waiting for this one somewhere else, so that all of them hang.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

ASKS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
PARENT = "ZOO_PARENT"  # environment variable: the process without which this one is to end


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception, so that no process is left behind."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in ASKS if number != signal.SIGINT}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup wants it so
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Signals(_SignalConnector):
    """Ctrl-C, SIGTERM and SIGHUP while a trainer runs.

    While they are `noted`, a handler only remembers the first of them; whoever set that looks at `wish` between two
    steps. A second Ctrl-C ends at once. Otherwise, as in an evaluation, they end the process as an exception.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self.noted = False
        self.wish: int | None = None
        self._process = os.getpid()

    def register_signal_handlers(self) -> None:
        """Take the signals over; not SIGHUP under nohup, where it is to be ignored."""
        super().register_signal_handlers()
        self.wish, self._process = None, os.getpid()
        for number in ASKS:
            if number == signal.SIGINT or self._original_handlers.get(number) is not signal.SIG_IGN:
                self._register_signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked data worker: its parent decides
        if self.noted and (self.wish is None or number != signal.SIGINT):
            first, self.wish = self.wish is None, self.wish or number
            if first:
                with suppress(OSError):  # a terminal that hung up takes no words
                    os.write(2, f"\n{_received(number)}\n".encode())  # print is not safe in a handler
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise ended_by(number)

    def end(self, number: int) -> BaseException:
        """What to raise to end the run because of a signal, which this or another process received."""
        if number == signal.SIGINT:
            return KeyboardInterrupt()
        self.received_sigterm = True
        return ended_by(number)


def ended_by(number: int) -> SIGTERMException:
    """The exception with the exit code that a scheduler expects; Lightning's own has none, which looks like success."""
    error = SIGTERMException()
    error.code = 128 + number
    return error


def _received(number: int) -> str:
    again = "; Ctrl-C again stops at once, without saving" if number == signal.SIGINT else ""
    return f"Stopping when this step is done and saved{again}."


class Agreement:
    """Numbers that all processes know of each other, a call later: so none of them waits for another.

    Each process calls `share` equally often.

    Args:
        device: Where the processes' collectives take tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # beside the training's
        self._before: tuple[Tensor, Any] | None = None

    def share(self, *numbers: int) -> list[int]:
        """The largest of what the processes gave in the call before, number by number; zeros in the first call."""
        before, self._before = self._before, self._send(numbers)
        if before is None:
            return [0] * len(numbers)
        known, arrived = before
        arrived()
        return known.tolist()

    def _send(self, numbers: Sequence[int]) -> tuple[Tensor, Callable[[], Any]]:
        """The numbers on their way, and what waits until they have arrived."""
        if self._stream is None:
            sent = torch.tensor(numbers)
            return sent, dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True).wait
        with torch.cuda.stream(self._stream):
            sent = torch.tensor(numbers, device=self._device)
            dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True).wait()  # this stream waits, not the host
            known = torch.empty(len(numbers), dtype=sent.dtype, pin_memory=True)
            known.copy_(sent, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return known, arrived.synchronize


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the system send this process a signal when the one named in `ZOO_PARENT` ends, however it ends (Linux).

    Without it a killed sweep leaves its runs training, and a killed run the other processes of its devices.
    """
    parent = os.environ.get(PARENT)
    if not parent or sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the parent was started behind a shell's &
    ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), number)


@contextmanager
def interruptible() -> Iterator[None]:
    """A Ctrl-C that ends a trainer inside the block leaves it as a KeyboardInterrupt, and the next one is heard again.

    Lightning ends the process instead, and ignores Ctrl-C from then on.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
