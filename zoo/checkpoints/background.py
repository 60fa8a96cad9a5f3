"""Background writing: a thread that runs jobs while training continues, and copies of the data that jobs need."""

import concurrent.futures
import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Background:
    """Runs jobs one after another in a separate thread. After a failed job, the queued ones are dropped.

    The process waits for them before it ends, unless a signal kills it.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")
        self._last: concurrent.futures.Future[None] | None = None

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


def host_copy(value: Any) -> Any:
    """A deep copy of nested containers with all tensors copied to host memory, even those already there.

    Tensors that share all their memory, such as tied weights, share it in the copy, too.
    """
    copies: dict[Any, Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor):
            identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if identity not in copies:
                copies[identity] = tensor.detach().to("cpu", copy=True)
            memo[id(tensor)] = copies[identity]
    return copy.deepcopy(value, memo)
