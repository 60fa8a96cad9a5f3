"""Background writing: a thread that runs jobs while training continues, and copies of the data that jobs need."""

import concurrent.futures
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.core.torch_internals import tree_leaves

BLOCK, ALIGNMENT = 1 << 28, 64  # bytes
OF_STEP = ("state_dict", "optimizer_states")  # parts of a checkpoint that only steps change


class Background:
    """Runs jobs one after another in a separate thread. After a failed job, the queued ones are dropped.

    The process waits for them before it ends, unless a signal kills it. Jobs have the current GPU of the thread that
    makes this.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_initialized()
        device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if on_gpu else (None, ())
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "background", *device)
        self._last: concurrent.futures.Future[None] | None = None
        self._space = HostSpace()
        self._step: int | None = None  # of the last copy
        self._of_step: dict[str, Any] = {}

    def copy(self, checkpoint: dict[str, Any], step: int) -> dict[str, Any]:
        """Copy a checkpoint of a step to host memory, which is that of the last copy; of the same step, only the rest.

        A copy of another step waits for all jobs, and raises as `wait` does. One of the same step shares the weights
        and the optimiser.
        """
        if step != self._step:
            self.wait()
            self._space.start()
            self._of_step = {}
        rest = {key: value for key, value in checkpoint.items() if key not in self._of_step}
        copied = host_copy(rest, self._space if step != self._step else None)
        self._of_step = self._of_step or {key: copied[key] for key in OF_STEP if key in copied}
        self._step = step
        return {key: self._of_step[key] if key in self._of_step else copied[key] for key in checkpoint}

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take host memory for copies of tensors of these sizes in bytes, as the next job.

        Otherwise the first copy takes it, which holds training for a second or more for each 2 GB. No CUDA graph may be
        captured until the job is done.
        """
        self.add(partial(self._space.reserve, sizes))

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        previous = self._last

        def run() -> None:
            if previous is not None:
                previous.result()  # done by now; raises if the previous job did
            job()

        self._last = self._thread.submit(run)

    def wait(self) -> None:
        """Wait for all jobs; raise the exception of the first failed one, once."""
        if self._last is None:
            return
        concurrent.futures.wait([self._last])  # a Ctrl-C here changes nothing
        last, self._last = self._last, None
        last.result()


class HostSpace:
    """Page-locked host memory for copies of GPU tensors, which is allocated once and reused."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._block = self._used = 0

    def start(self) -> None:
        """Reuse all of it; earlier copies are overwritten."""
        self._block = self._used = 0

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate memory for copies of tensors of these sizes in bytes."""
        self.start()
        for size in sizes:
            self._place(size)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a GPU tensor in a separate storage, complete when the device is synchronised."""
        if not tensor.numel() or tensor.layout is not torch.strided:
            return tensor.detach().to("cpu", copy=True)
        place = torch.frombuffer(self._place(tensor.nbytes), dtype=tensor.dtype, count=tensor.numel())
        return place.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)

    def _place(self, size: int) -> np.ndarray:
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if self._used + size <= len(block):
                start, self._used = self._used, self._used + -(-size // ALIGNMENT) * ALIGNMENT
                return block[start : start + size]
            self._block, self._used = self._block + 1, 0
        # the allocator of page-locked memory rounds up to powers of two
        self._blocks.append(torch.empty(max(size, BLOCK), dtype=torch.uint8, pin_memory=True).numpy())
        return self._place(size)


def host_copy(value: Any, space: HostSpace | None = None) -> Any:
    """A deep copy of nested containers with all tensors copied to host memory, even those already there.

    Tensors that share all their memory, such as tied weights, share it in the copy, too. Those of a GPU are copied into
    `space`, if there is one.
    """
    copies: dict[Any, Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor):
            identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if identity not in copies:
                if space is not None and tensor.is_cuda:
                    copies[identity] = space.copy(tensor)
                else:
                    copies[identity] = tensor.detach().to("cpu", copy=True)
            memo[id(tensor)] = copies[identity]
    if space is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return copy.deepcopy(value, memo)
