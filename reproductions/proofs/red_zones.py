"""Memory around tensors that nobody may write, and whose content nobody may use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

ZONE = 4096  # bytes on each side of a tensor
PATTERN = 0xFF  # a NaN in every floating type
aten = torch.ops.aten
UNINITIALISED = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)


class RedZones(TorchDispatchMode):
    """Allocate uninitialised tensors between two zones of NaNs, inside a ``with`` block.

    An op that reads its neighbours' memory then has NaNs in its results; one that writes there changes a zone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[Tensor, int]] = []  # with the bytes of the tensor inside

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        return self.surrounded(result) if op.overloadpacket in UNINITIALISED else result

    def surrounded(self, x: Tensor) -> Tensor:
        """A tensor like x, with its content, between two zones."""
        if x.is_meta or not x.numel() or 0 in x.stride():
            return x
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        size = (last + 1) * x.itemsize
        buffer = torch.full((ZONE + -(-size // 8) * 8 + ZONE,), PATTERN, dtype=torch.uint8, device=x.device)
        self.buffers.append((buffer, size))
        # in a storage that begins with the tensor, as autograd expects of new ones
        inside = from_dlpack(buffer[ZONE:]).view(x.dtype).as_strided(x.shape, x.stride())
        return inside.copy_(x)

    def overwritten(self) -> int:
        """The number of bytes of zones that have changed."""
        zones = (torch.cat([buffer[:ZONE], buffer[ZONE + size :]]) for buffer, size in self.buffers)
        return sum(int((zone != PATTERN).sum()) for zone in zones)


def inside_red_zones(
    call: Callable[[dict[str, Tensor]], dict[str, Tensor]], inputs: dict[str, Tensor]
) -> tuple[int, list[str]]:
    """Run a call whose inputs, and all that it allocates, lie between red zones.

    Returns:
        The number of bytes that were written outside of tensors, and the names of results that are not finite.
    """
    with RedZones() as zones:
        results = call({name: zones.surrounded(x) for name, x in inputs.items()})
    wrong = [name for name, y in results.items() if not bool(torch.isfinite(y).all())]
    return zones.overwritten(), wrong
