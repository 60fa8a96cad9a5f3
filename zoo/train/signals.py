"""Signals that end a run, and processes that end together with their parent."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
PARENT = "ZOO_PARENT"  # environment variable: id of the process with which this one is to end


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into exceptions inside the block, so that child processes are cleaned up."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS if number != signal.SIGINT}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Deliver a Ctrl-C that arrives inside the block at its end, so that what belongs together is done together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


class Agreement:
    """The maximum of some numbers over all processes, available one call later, so that no process waits.

    Each process must call `share` equally often.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # apart from the training stream
        self._previous: tuple[Tensor, Any] | None = None

    def share(self, *numbers: int) -> list[int]:
        """The elementwise maximum of the numbers of all processes in the previous call; zeros in the first call."""
        previous, self._previous = self._previous, self._send(numbers)
        if previous is None:
            return [0] * len(numbers)
        result, wait = previous
        wait()
        return result.tolist()

    def _send(self, numbers: Sequence[int]) -> tuple[Tensor, Callable[[], Any]]:
        """Start the reduction: the tensor it writes to, and a function that waits for it."""
        if self._stream is None:
            sent = torch.tensor(numbers)
            return sent, dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True).wait
        with torch.cuda.stream(self._stream):
            sent = torch.tensor(numbers, device=self._device)
            dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True).wait()  # this stream waits, not the host
            result = torch.empty(len(numbers), dtype=sent.dtype, pin_memory=True)
            result.copy_(sent, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return result, copied.synchronize


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the system to signal this process when the one named in `ZOO_PARENT` ends, however it ends (Linux only).

    Otherwise a killed sweep would leave its runs training, and a killed run its other ranks.
    """
    parent = os.environ.get(PARENT)
    if not parent or sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent started with a shell's & ignores it
    ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:  # it has ended already
        os.kill(os.getpid(), number)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt if Ctrl-C ends a trainer inside the block, and restore the handler of Ctrl-C.

    Lightning would end the process, and ignore Ctrl-C from then on.
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
