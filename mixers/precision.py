"""Parameters that do not follow a module into low precision."""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


class KeepsFp32(nn.Module):
    """A module whose parameters named in `keep_fp32` stay in at least fp32, whatever it is cast to or built in.

    These are parameters that an optimiser step changes by less than the resolution of bf16 (1/128 near 1), or from
    which a recurrence computes powers as high as the sequence is long. All others become bf16 under `bf16-true`.
    """

    keep_fp32: ClassVar[tuple[str, ...]] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in PyTorch, but a parameter of lower precision, such as one in the default dtype, becomes fp32."""
        if param is not None and name in self.keep_fp32 and (dtype := at_least(param.dtype)) != param.dtype:
            param = nn.Parameter(param.detach().to(dtype), param.requires_grad)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `to`, `bfloat16`, `half` … of this module and of its parents end up here
        named = [p for name in self.keep_fp32 if (p := self._parameters.get(name)) is not None]
        fp32_ids = {id(x) for p in named for x in (p, p.grad)}

        def convert(x: Tensor) -> Tensor:
            y = fn(x)
            if id(x) not in fp32_ids or y.dtype == x.dtype:
                return y
            return x.to(y.device, at_least(y.dtype))

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(convert, recurse=False)


def at_least(dtype: torch.dtype) -> torch.dtype:
    """A dtype, or fp32 if that has more digits."""
    return torch.promote_types(dtype, torch.float32)
