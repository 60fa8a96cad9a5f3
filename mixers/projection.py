"""Several linear maps of one input, fused into one matrix product."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid, tanh
from kernels.linear import Product, few_products

# names of the activations that `few_products` computes
FUSED: dict[Callable[[Tensor], Tensor] | None, Literal["none", "sigmoid", "tanh"]] = {
    None: "none",
    sigmoid: "sigmoid",
    tanh: "tanh",
}
UNIT = 16  # columns: rows of whole units are what tensor cores and the compiler of our kernels can read in large pieces
MANY = 512  # rows of a product that takes longer than a copy of its weight


def lacking(x: Tensor, columns: int) -> int:
    """Padding of a product of x: the number of columns that make its width a multiple of `UNIT`.

    Without this padding, cuBLAS falls back to kernels of older GPUs in half precision, at a third of the speed on
    Hopper, and kernels in Triton read the columns one by one.
    """
    return -columns % UNIT if x.is_cuda and x.numel() >= MANY * x.shape[-1] else 0


def adjacent(x: Tensor, y: Tensor) -> Tensor:
    """x [B,T,N] and y [B,T,M] side by side; a view if they are columns of a product, next to each other."""
    columns = x.shape[:2] == y.shape[:2] and x.stride() == y.stride() and x.stride(2) == 1
    columns = columns and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    if columns and y.data_ptr() == x.data_ptr() + x.shape[2] * x.element_size():
        return x.as_strided((*x.shape[:2], x.shape[2] + y.shape[2]), x.stride())
    return torch.cat([x, y], -1)


def head_products(x: Tensor, weight: Tensor, rest: Tensor | None, size: int) -> Tensor:
    """Multiply each head of x [B,T,H,K] by its matrix [H,K,N], and append `rest` [B,T,H,size − N].

    Without `rest`, nothing is written to the last size − N channels, T must be 1, and gradients must be off.
    """
    if rest is not None:
        return torch.cat([torch.einsum("bthk,hkn->bthn", x, weight), rest], -1)
    y = x.new_empty(*x.shape[:3], size)
    torch.bmm(x[:, 0].transpose(0, 1), weight, out=y[:, 0, :, : weight.shape[2]].transpose(0, 1))
    return y


class Projection(nn.Linear):
    """Named linear maps of x, computed as one product; the outputs are views of its result.

    A state dict holds each map under its name (`in_proj.q.weight` …), so that checkpoints do not depend on the fused
    layout; the fused `in_proj.weight`, which sharded optimisers save, is accepted as well. So it is with biases.

    Args:
        size: Size of the input.
        widths: Width of each output by name, in the order of the fused matrix.
        bias: Whether each map has a bias.
        zeros: Names of the maps whose weights start at zero.
    """

    def __init__(self, size: int, widths: Mapping[str, int], *, bias: bool = False, zeros: Sequence[str] = ()):
        super().__init__(size, sum(widths.values()), bias=bias)
        self.widths, self.zeros = dict(widths), tuple(zeros)
        self.start_at_zero()
        self.register_load_state_dict_pre_hook(_join)
        self.register_state_dict_post_hook(_split)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        weight, bias, widths = self.weight, self.bias, list(self.widths.values())
        if not (more := lacking(x, len(weight))):
            return kernels.split_columns(kernels.linear(x, weight, bias), widths)
        padded = None if bias is None else F.pad(bias, (0, more))
        return kernels.split_columns(kernels.linear(x, F.pad(weight, (0, 0, 0, more)), padded), [*widths, more])[:-1]

    @torch.no_grad()
    def start_at_zero(self) -> None:
        """Set the weights of the maps in `zeros` to zero, after all weights were initialised alike."""
        if self.zeros and not self.weight.is_meta:
            for name, weight in zip(self.widths, self.weight.split([*self.widths.values()]), strict=True):
                if name in self.zeros:
                    weight.zero_()


def _fused(module: Projection, prefix: str) -> dict[str, list[str]]:
    """The name of each fused parameter → the names of its parts."""
    return {
        f"{prefix}{kind}": [f"{prefix}{name}.{kind}" for name in module.widths]
        for kind in ("weight", "bias")[: 1 if module.bias is None else 2]
    }


def _split(module: Projection, state: dict[str, Any], prefix: str, _: object) -> None:
    for fused, names in _fused(module, prefix).items():
        parts = state.pop(fused).split(list(module.widths.values()))
        # clones, because each view would be saved with all of the storage
        state.update(zip(names, (part.clone() for part in parts), strict=True))


def _join(module: Projection, state: dict[str, Any], prefix: str, *_: object) -> None:
    for fused, names in _fused(module, prefix).items():
        if all(name in state for name in names):
            state[fused] = torch.cat([state.pop(name) for name in names])


class Linear(nn.Linear):
    """A linear map, as `kernels.linear` computes it."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)


class OutputProjection(nn.Linear):
    """A linear map whose result is added to the residual stream; see `scale_output_projections`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)


class OrthogonalLinear(Linear):
    """A linear map without bias whose rows start orthogonal, or its columns if there are more rows.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        gain: Initial length of these rows or columns.
    """

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        self.gain = gain
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        if self.gain:
            weight = torch.empty_like(self.weight, dtype=torch.float32)  # a decomposition does not exist in bf16
            self.weight.copy_(nn.init.orthogonal_(weight, self.gain))
        else:
            nn.init.zeros_(self.weight)


class LowRankLinear(nn.Module):
    """f(x W₁) W₂, where W₁ starts at zero and W₂ orthogonal, times 0.1 (RWKV-7).

    Args:
        inputs: Size of the input.
        rank: Size in between.
        outputs: Size of the output.
        activation: f, elementwise; None for none.
    """

    def __init__(self, inputs: int, rank: int, outputs: int, activation: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.down, self.up = OrthogonalLinear(inputs, rank, 0.0), OrthogonalLinear(rank, outputs, 0.1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.up(y if self.activation is None else self.activation(y))


def mapped(maps: Sequence[tuple[Linear | LowRankLinear, Tensor]]) -> list[Tensor]:
    """Return the result of each linear map, also of low rank; for a single token, of all of them in two launches."""
    results = _mapped_together(maps)
    return [module(x) for module, x in maps] if results is None else results


def _mapped_together(maps: Sequence[tuple[Linear | LowRankLinear, Tensor]]) -> list[Tensor] | None:
    """Return the results of two launches; None if a map is something else than a product, or there are many tokens."""
    low_rank = {i: module for i, (module, _) in enumerate(maps) if isinstance(module, LowRankLinear)}
    first = [module.down if isinstance(module, LowRankLinear) else module for module, _ in maps]
    names = [FUSED.get(low_rank[i].activation) if i in low_rank else "none" for i in range(len(maps))]
    linear = [*first, *(module.up for module in low_rank.values())]
    own = any(type(module).forward is not Linear.forward or module.bias is not None for module in linear)
    if own or any(type(module).forward is not LowRankLinear.forward for module in low_rank.values()):
        return None
    inputs = zip((x for _, x in maps), first, names, strict=True)
    products = [Product(x, module.weight, name) for x, module, name in inputs if name is not None]
    results = few_products(products) if len(products) == len(maps) else None
    if results is None or not low_rank:
        return results
    ups = few_products([Product(results[i], module.up.weight) for i, module in low_rank.items()])
    return None if ups is None else [dict(zip(low_rank, ups, strict=True)).get(i, y) for i, y in enumerate(results)]


class ZeroOutputProjection(OutputProjection):
    """An output projection without bias that starts at zero, so that its layer at first adds nothing."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B,T,heads·size] → [B,T,heads,size]."""
    return x.unflatten(-1, (heads, -1))
