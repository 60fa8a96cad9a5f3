"""Device and dtype of the parameters of new modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode


@contextmanager
def created_on(device: torch.device | str) -> Iterator[None]:
    """Create tensors on a device inside the block, as `torch.device` does, but start quickly on the meta device."""
    with torch.device(device) as place, _NothingDrawn() if place.type == "meta" else nullcontext():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Skips the initialisation of embeddings and others by normal numbers on the meta device, which has no values.

    For `normal_` there, PyTorch imports its compiler, which takes as long as to import PyTorch.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is init.normal_:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)
