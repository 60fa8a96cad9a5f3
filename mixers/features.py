"""Operations between a projection and the recurrence, declared as data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import kernels
from kernels import ACTIVATIONS, NORMS
from kernels.rotary import doubled

from .arguments import check_numbers, check_sizes
from .context_parallel import ContextParallel
from .fusion import Fusable
from .precision import KeepsFp32

Activation = Literal["identity", "silu", "relu", "elu1"]


class FeatureMap(KeepsFp32):
    """Any map of each head separately: [B,T,heads,size] → [B,T,heads,out_size]. Subclass it and set `out_size`."""

    def __init__(self, heads: int, size: int):
        super().__init__()
        check_sizes({"heads": heads, "size": size})
        self.heads, self.size, self.out_size = heads, size, size

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map x, whose tokens are at `positions` [B or 1,T] in their documents."""
        raise NotImplementedError

    def pair(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Map queries and keys, which may have other heads, in one launch; None if that is not possible."""
        return None

    def turn(self, x: Tensor, positions: Tensor) -> kernels.Turn | None:
        """Return the map of x [B,1,heads,size] at `positions` [B] as an argument of a kernel; None if it cannot be."""
        return None


@dataclass(frozen=True)
class Features:
    """Short convolution → activation → norm → map, for each subhead separately.

    Args:
        conv: Taps of the causal depthwise convolution; 0 for none.
        bias: Whether the convolution has a bias.
        activation: identity, silu, relu or elu1 (1 + ELU).
        norm: none, l2 or l1 (over the head).
        map: A feature map (a class of `mixers`, or your own), such as Rotary; null for none.
    """

    conv: int = 0
    bias: bool = False
    activation: Activation = "identity"
    norm: Literal["none", "l2", "l1"] = "none"
    map: Callable[[int, int], FeatureMap] | None = None

    def __post_init__(self) -> None:
        check_sizes({"conv": self.conv}, least=0)
        if self.bias and not self.conv:
            raise kernels.UserError(
                f"conv: {self.conv} taps{' with a bias' if self.bias else ''}; choose 1 or more, or 0"
            )
        for name, value, allowed in (("activation", self.activation, ACTIVATIONS), ("norm", self.norm, NORMS)):
            if value not in allowed:
                raise kernels.UserError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


def activated(stream: Tensor, activation: Activation) -> Tensor:
    """The activation alone, which is recomputed in the backward pass inside `kernels.recomputing()`."""
    ((y, _),) = kernels.features_together([kernels.FeatureStream(stream, activation=activation, kept=False)])
    return y


class HeadProduct(NamedTuple):
    """A product of each head of a stream [B,T,G,K] by its matrix, after an activation."""

    weight: Tensor  # [G,K,N]
    before: Activation = "identity"


class FeaturePath(nn.Module):
    """The modules behind one `Features`, for `heads` heads of `size`.

    With `kept`, what an expansion makes is saved for the backward pass, and not computed again there.
    """

    def __init__(self, spec: Features, heads: int, size: int, kept: bool = False):
        super().__init__()
        self.kept = kept
        self.spec, self.heads, self.channels = spec, heads, heads * size
        self.weight = nn.Parameter(torch.empty(self.channels, 1, spec.conv)) if spec.conv else None
        self.bias = nn.Parameter(torch.empty(self.channels)) if spec.bias else None
        self.map = spec.map(heads, size) if spec.map else None
        self.out_size = self.map.out_size if self.map is not None else size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            bound = self.spec.conv**-0.5
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def init_history(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch_size, max(self.spec.conv - 1, 0), self.channels, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        history: Tensor | None,
        positions: Tensor,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B,T,heads,size] → [B,T,heads,out_size], and the next history if one was given."""
        (result,), _, _ = together([self], [x], [history], positions, cu_seqlens, context_parallel)
        return result

    def stream(
        self,
        x: Tensor,
        product: HeadProduct | None,
        history: Tensor | None,
        cu_seqlens: Tensor | None,
        return_history: bool,
    ) -> kernels.FeatureStream:
        """The arguments of `kernels.features_together` for x [B,T,heads,size], or for the x [B,T,G,K] of a product."""
        return kernels.FeatureStream(
            x,
            self.weight,
            self.bias,
            activation=self.spec.activation,
            norm=self.spec.norm,
            history=history,
            return_history=return_history,
            cu_seqlens=cu_seqlens,
            consume_history=True,  # it is part of a state
            product=None if product is None else product.weight,
            before="identity" if product is None else product.before,
            subheads=1 if product is None else self.heads // len(product.weight),
            kept=True if self.kept else None,
        )


def together(
    paths: Sequence[FeaturePath],
    streams: Sequence[Tensor],
    histories: Sequence[Tensor | None],
    positions: Tensor,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None = None,
    gates: kernels.GateInputs | None = None,
    products: Sequence[HeadProduct | None] | None = None,
    others: Sequence[Tensor] = (),
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor, Tensor] | None, list[Tensor]]:
    """Compute the features of each path's stream, and the gates if there are any, in fewer launches where possible.

    The first two paths are those of queries and keys. A stream with a product is multiplied first. `others` are further
    columns of the projection; the returned tensors are to be used in their place (`kernels.features_of_columns`).
    """
    streams, histories, products = list(streams), list(histories), list(products or [None] * len(paths))
    returned = [history is not None for history in histories]
    if context_parallel is not None:
        _continue_parts(paths, streams, histories, products, cu_seqlens, context_parallel)
    arguments = zip(paths, streams, products, histories, returned, strict=True)
    inputs = [path.stream(x, product, history, cu_seqlens, back) for path, x, product, history, back in arguments]
    made, done, others = kernels.features_of_columns(inputs, gates, others)
    features = _mapped(paths, [y for y, _ in made], positions)
    return list(zip(features, (history for _, history in made), strict=True)), done, others


def _mapped(paths: Sequence[FeaturePath], streams: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
    """The maps of all streams, that of queries and keys, the first two, in one launch where possible."""
    maps, pair = [path.map for path in paths], None
    if maps[0] is not None and len(maps) > 1 and alike(paths[0], paths[1]):
        pair = maps[0].pair(streams[0], streams[1], positions)
    done = () if pair is None else pair
    others = zip(maps[len(done) :], streams[len(done) :], strict=True)
    results = *done, *(x if map is None else map(x, positions) for map, x in others)
    return [y.to(x.dtype) for y, x in zip(results, streams, strict=True)]


def alike(q: FeaturePath, k: FeaturePath) -> bool:
    """Return whether the maps of two paths compute the same function of a head."""
    if q.map is None or k.map is None or q.map is k.map:
        return q.map is k.map
    return q.spec == k.spec and q.map.size == k.map.size and not _has_tensors(q.map)


def _has_tensors(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers, by which it may differ from others and change."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _continue_parts(
    paths: Sequence[FeaturePath],
    streams: list[Tensor],
    histories: list[Tensor | None],
    products: list[HeadProduct | None],
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel,
) -> None:
    """Give all convolutions the last inputs of the parts before this one, in one exchange."""
    places = [i for i, path in enumerate(paths) if path.spec.conv > 1]
    for i in places:
        context_parallel.check(histories[i], cu_seqlens)
        if (product := products[i]) is not None:  # its results are what other parts of the sequence need
            x, products[i] = activated(streams[i], product.before), None
            streams[i] = kernels.head_linear(x, product.weight).view(*x.shape[:2], paths[i].heads, -1)
    if places:
        taps = [paths[i].spec.conv - 1 for i in places]
        exchanged = context_parallel.histories([streams[i].flatten(2) for i in places], taps, own_gradients=True)
        for i, x, history in zip(places, *exchanged, strict=True):
            streams[i], histories[i] = x.view(streams[i].shape), history


class Rotary(FeatureMap, Fusable):
    """Rotary position embedding, the halves of what turns forming the pairs (arXiv 2104.09864).

    Args:
        heads: Number of heads.
        size: Size of a head.
        base: The slowest pair turns by about 1/base per token.
        fraction: How much of each head turns: its first fraction · size entries, an even number. The others
            carry no position.
    """

    amplitude = 1.0  # factor of what turns

    def __init__(self, heads: int, size: int, *, base: float = 10000.0, fraction: float = 1.0):
        super().__init__(heads, size)
        check_numbers({"base": base})
        check_numbers({"fraction": fraction}, positive=False)
        if fraction == 1 and size % 2:
            raise kernels.UserError(f"head_dim: {size} is odd; rotary embedding needs pairs")
        self.base, self.turning = base, int(size * fraction)
        self._rates: dict[tuple[Any, ...], Tensor] = {}
        if not 0 < fraction <= 1 or self.turning < 2 or self.turning % 2:
            raise kernels.UserError(
                f"fraction: {fraction} of head_dim {size} is {self.turning}; rotary embedding needs an even number of "
                f"entries from 2 to {size}"
            )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return kernels.rotary(x, positions, self.rates(x), amplitude=self.amplitude)

    def pair(self, q: Tensor, k: Tensor, positions: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor] | None:
        """As for a FeatureMap; with `last`, `size` is that of the last channels of heads, those that turn."""
        if not self.fused or (last and self.turning < self.size):
            return None
        return kernels.rotary(q, positions, self.rates(q), amplitude=self.amplitude, last=last, other=k)

    def turn(self, x: Tensor, positions: Tensor, *, last: bool = False) -> kernels.Turn | None:
        """As for a FeatureMap; with `last`, `size` is that of the last channels of heads, those that turn."""
        if not self.fused or (last and self.turning < self.size):
            return None
        return kernels.Turn(positions, self.rates(x), self.amplitude, last)

    def turn_last(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the last `size` channels of the heads of q, and k, whose heads have only these."""
        pair = self.pair(q, k, positions, last=True)
        if pair is None:
            still, turning = q.split([q.shape[3] - self.size, self.size], -1)
            turned, k_turned = (self(x, positions) for x in (turning, k))
            pair = torch.cat([still, turned.to(q.dtype)], -1), k_turned
        return pair[0].to(q.dtype), pair[1].to(k.dtype)

    def rates(self, like: Tensor) -> Tensor:
        """The frequencies of all pairs in at least fp32 on the device of `like`.

        They are computed once for each device and for all numbers that the module has as attributes.
        """
        numbers = (x for name, x in vars(self).items() if isinstance(x, int | float) and name != "training")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32  # bf16 cannot represent position 10001
        key = like.device, dtype, *numbers
        if key in self._rates:
            return self._rates[key]
        with torch.inference_mode(False):  # they may serve the next training step
            rates = self.frequencies(torch.arange(self.turning // 2, device=like.device, dtype=dtype))
        if not _has_tensors(self) and not torch.compiler.is_compiling():
            self._rates[key] = rates
        return rates

    def frequencies(self, pair: Tensor) -> Tensor:
        """The angles by which pairs turn per token, in radians, for their numbers [turning/2]."""
        return self.base ** (-2 * pair / self.turning)


class LRPE(FeatureMap, Fusable):
    """[cos(θt)·x, sin(θt)·x] with a learned θ per channel, which doubles the size (cosFormer2; arXiv 2307.09270).

    θ starts at base^(−2j/d) over all d channels, as in the original authors' code.

    Args:
        heads: Number of heads.
        size: Size of a head.
        base: The slowest channel turns by about 1/base² per token.
    """

    no_weight_decay = keep_fp32 = ("theta",)

    def __init__(self, heads: int, size: int, *, base: float = 10000.0):
        super().__init__(heads, size)
        check_numbers({"base": base})
        self.base, self.out_size, self.theta = base, 2 * size, nn.Parameter(torch.empty(heads, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.theta.is_meta:  # it has no values, and for these formulas PyTorch would import its compiler
            return
        channel = torch.arange(self.theta.numel(), device=self.theta.device, dtype=torch.float32)
        self.theta.copy_((self.base ** (-2 * channel / self.theta.numel())).view_as(self.theta))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return doubled(x, positions, kernels.at_least_fp32(self.theta))

    def turn(self, x: Tensor, positions: Tensor) -> kernels.Turn | None:
        return kernels.Turn(positions, kernels.at_least_fp32(self.theta)) if self.fused else None
