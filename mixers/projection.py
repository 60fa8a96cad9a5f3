"""Several linear maps of one input, fused into one matrix product."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import kernels


class Projection(nn.Linear):
    """Named linear maps of x without bias, computed as one product; the outputs are views of its result.

    A state dict holds each map under its name (`in_proj.q.weight` …), so that checkpoints do not depend on the fused
    layout; the fused `in_proj.weight`, which sharded optimisers save, is accepted as well.

    Args:
        size: Size of the input.
        widths: Width of each output by name, in the order of the fused matrix.
    """

    def __init__(self, size: int, widths: Mapping[str, int]):
        super().__init__(size, sum(widths.values()), bias=False)
        self.widths = dict(widths)
        self.register_load_state_dict_pre_hook(_join)
        self.register_state_dict_post_hook(_split)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return kernels.split_columns(self.together(x), list(self.widths.values()))

    def together(self, x: Tensor) -> Tensor:
        """All outputs side by side."""
        return super().forward(x)


def _names(module: Projection, prefix: str) -> list[str]:
    return [f"{prefix}{name}.weight" for name in module.widths]


def _split(module: Projection, state: dict[str, Any], prefix: str, _: object) -> None:
    parts = state.pop(prefix + "weight").split(list(module.widths.values()))
    # clones, because each view would be saved with all of the storage
    state.update(zip(_names(module, prefix), (part.clone() for part in parts), strict=True))


def _join(module: Projection, state: dict[str, Any], prefix: str, *_: object) -> None:
    names = _names(module, prefix)
    if all(name in state for name in names):
        state[prefix + "weight"] = torch.cat([state.pop(name) for name in names])


class OutputProjection(nn.Linear):
    """A linear map without bias whose result is added to the residual stream; see `scale_output_projections`.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B,T,heads·size] → [B,T,heads,size]."""
    return x.unflatten(-1, (heads, -1))
