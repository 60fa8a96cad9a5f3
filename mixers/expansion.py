"""State expansion (Liu et al., "Scaling up the State Size of RNN LLMs", section 4): longer queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.linear.tiles import linear

from .arguments import check_sizes
from .features import Activation, HeadProduct, activated
from .fusion import Fusable
from .precision import KeepsFp32
from .projection import Linear


class Expansion(nn.Module):
    """Makes queries or keys `factor` times longer: [B,T,heads,size] → [B,T,heads,factor·size].

    With subheads, entries e·size … (e+1)·size − 1 of a head form subhead e.

    Args:
        heads: Number of key heads.
        size: Size of a key head K.
        factor: E.
        hidden_size: Size of the layer's input.
    """

    def __init__(self, heads: int, size: int, factor: int, hidden_size: int):
        super().__init__()
        check_sizes({"heads": heads, "size": size, "factor": factor})
        check_sizes({"hidden_size": hidden_size}, least=0)  # 0 if nothing is made of the layer's input
        self.heads, self.size, self.factor = heads, size, factor

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        """Expand `stream` [B,T,heads,size]; x [B,T,hidden] is the layer's input, for expansions that depend on it."""
        raise NotImplementedError

    def factors(self, stream: Tensor, x: Tensor) -> tuple[Tensor, HeadProduct | None]:
        """Return a stream and the product of each head that expands it, so that features can include the product.

        Without such a product, return the expanded stream and None.
        """
        return self(stream, x), None


class HeadWise(Expansion, Fusable):
    """SiLU(q_i) W_i with W_i [K, E·K] for each head i (equation 8, with the activation of section 4.3).

    Args:
        heads: Number of key heads.
        size: Size of a key head K.
        factor: E.
        hidden_size: Size of the layer's input.
        activation: Applied before the expansion: silu, relu, elu1 or identity.
    """

    def __init__(self, heads: int, size: int, factor: int, hidden_size: int, *, activation: Activation = "silu"):
        super().__init__(heads, size, factor, hidden_size)
        self.activation, self.weight = activation, nn.Parameter(torch.empty(heads, size, factor * size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.size**-0.5)

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return kernels.head_linear(activated(stream, self.activation), self.weight)

    def factors(self, stream: Tensor, x: Tensor) -> tuple[Tensor, HeadProduct | None]:
        return (stream, HeadProduct(self.weight, self.activation)) if self.fused else (self(stream, x), None)


class LowRank(Expansion):
    """SiLU(q) A B over all heads jointly, with A [H·K, rank] and B [rank, E·H·K] (the low-rank row of table 7).

    Args:
        heads: Number of key heads.
        size: Size of a key head K.
        factor: E.
        hidden_size: Size of the layer's input.
        activation: Applied before the expansion: silu, relu, elu1 or identity.
        rank: Null for the rank with as many parameters as the head-wise expansion, E·K/(E + 1), rounded.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        factor: int,
        hidden_size: int,
        *,
        activation: Activation = "silu",
        rank: int | None = None,
    ):
        super().__init__(heads, size, factor, hidden_size)
        rank = round(factor * size / (factor + 1)) if rank is None else rank
        check_sizes({"rank": rank})
        width, self.activation = heads * size, activation
        self.down, self.up = nn.Parameter(torch.empty(width, rank)), nn.Parameter(torch.empty(rank, factor * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.down, self.up):
            nn.init.normal_(weight, std=len(weight) ** -0.5)

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        y = activated(stream, self.activation).flatten(2)
        y = linear(linear(y, self.down.T), self.up.T)
        return y.unflatten(-1, (self.heads, self.factor * self.size))


class DPFP(Expansion):
    """r ⊙ roll(r, −j) for j = 1 … E/2, with r = ReLU([q, −q]): no parameters, sparse (arXiv 2102.11174).

    Args:
        heads: Number of key heads.
        size: Size of a key head K.
        factor: E, even.
        hidden_size: Size of the layer's input.
    """

    def __init__(self, heads: int, size: int, factor: int, hidden_size: int):
        super().__init__(heads, size, factor, hidden_size)
        if factor % 2:
            raise kernels.UserError(f"factor: DPFP expands by even factors, not by {factor}")

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        r = torch.cat([stream, -stream], -1).relu()
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.factor // 2 + 1)], -1)


class LFM(Expansion):
    """vec(ReLU(p) ⊗ ReLU(q)) with p = W_p x, E numbers per head (the feature map of AGaLiTe, arXiv 2310.15719).

    Subhead e is ReLU(q) times one number, which a norm behind it would cancel.

    Args:
        heads: Number of key heads.
        size: Size of a key head K.
        factor: E.
        hidden_size: Size of the layer's input.
    """

    def __init__(self, heads: int, size: int, factor: int, hidden_size: int):
        super().__init__(heads, size, factor, hidden_size)
        self.p_proj = Linear(hidden_size, heads * factor, bias=False)

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        p = self.p_proj(x).relu().unflatten(-1, (self.heads, self.factor))
        return (p[..., None] * stream.relu()[..., None, :]).flatten(-2)


class Residual(Expansion):
    """The unchanged head as subhead 0, and another expansion of it as the others.

    Args:
        others: The expansion that makes the other subheads, of a factor one less.
    """

    def __init__(self, others: Expansion):
        super().__init__(others.heads, others.size, others.factor + 1, 0)
        self.others = others

    def forward(self, stream: Tensor, x: Tensor) -> Tensor:
        return torch.cat([stream, self.others(stream, x)], -1)


class SubheadGain(KeepsFp32):
    """Queries [B,T,heads·E,K] times one learned number per subhead, initially 0; subhead 0 is unchanged.

    Where queries were repeated for value heads, each of these gets the numbers of its key head. It is applied after the
    features and gates: a norm would cancel a gain before it, and magnify the gradient of one near 0.
    """

    no_weight_decay = keep_fp32 = ("weight",)

    def __init__(self, heads: int, factor: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, factor - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, q: Tensor) -> Tensor:
        gains = F.pad(self.weight, (1, 0), value=1.0)
        gains = gains.repeat_interleave(q.shape[2] // gains.numel(), 0).flatten()
        return q * gains[:, None].to(q.dtype)


Recomputed = Literal["queries", "states"]


@dataclass(frozen=True)
class Expand:
    """Settings of the expansion of a mixer at a site."""

    factor: int
    subheads: int
    build_expansion: Callable[[int, int, int, int], Expansion]
    residual: bool = False
    recompute: bool | Recomputed = True

    def build(self, heads: int, size: int, hidden_size: int) -> Expansion:
        """The expansion of queries or keys with `heads` heads of `size`."""
        if self.residual:
            return Residual(self.build_expansion(heads, size, self.factor - 1, hidden_size))
        return self.build_expansion(heads, size, self.factor, hidden_size)

    def build_gain(self, heads: int) -> SubheadGain | None:
        """The gains of the subheads of `heads` query heads; None if there are none."""
        return SubheadGain(heads, self.factor) if self.residual else None
