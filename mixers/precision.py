"""Parameters that do not follow a module into low precision."""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


class KeepsFp32(nn.Module):
    """A module that names, in `keep_fp32`, parameters of its own that stay in at least fp32 when it is cast.

    A step of the optimiser changes them by less than bf16 can tell apart (near 1, 1/128), or a recurrence raises what
    is made of them to the length of the sequence. All other parameters become bf16 under `bf16-true`.
    """

    keep_fp32: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `to`, `bfloat16`, `half` … of this module and of any around it come through here
        own = [p for name in self.keep_fp32 if (p := self._parameters.get(name)) is not None]
        kept = {id(x) for p in own for x in (p, p.grad)}

        def careful(x: Tensor) -> Tensor:
            y = fn(x)
            if id(x) not in kept or y.dtype == x.dtype:
                return y
            return x.to(y.device, torch.promote_types(y.dtype, torch.float32))

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(careful, recurse=False)
