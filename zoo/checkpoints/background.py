"""Jobs that a thread does while the run goes on, and a copy of their material that the run does not change."""

import concurrent.futures
import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Background:
    """Does jobs one after another in a thread of its own. After one that failed, those that wait are not done.

    The end of the process waits for them, unless a signal kills it.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")
        self._last: concurrent.futures.Future[None] | None = None

    def add(self, job: Callable[[], None]) -> None:
        """Have `job` done after those before it."""
        before = self._last

        def do() -> None:
            if before is not None:
                before.result()  # done by now; raises what it raised
            job()

        self._last = self._thread.submit(do)

    def wait(self) -> None:
        """Return when all jobs are done, or raise what the first one that failed raised; once, it is forgotten then."""
        if self._last is None:
            return
        concurrent.futures.wait([self._last])  # a Ctrl-C here leaves all as it is
        last, self._last = self._last, None
        last.result()


def host_copy(value: Any) -> Any:
    """A deep copy of containers with all their tensors in the memory of the host, also of those that are there.

    Tensors that share memory as a whole, as tied weights do, share it in the copy.
    """
    copies: dict[Any, Tensor] = {}
    known: dict[int, Any] = {}
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor):
            same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if same not in copies:
                copies[same] = tensor.detach().to("cpu", copy=True)
            known[id(tensor)] = copies[same]
    return copy.deepcopy(value, known)
