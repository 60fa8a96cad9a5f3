"""DeltaNet."""

from torch import Tensor

import kernels

from .arguments import check_numbers
from .base import LinearMixer, Site, Streams, checked_site
from .decay import Strength
from .features import Features
from .norm import RMSNorm
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ",
    paper="Parallelizing linear transformers with the delta rule, arXiv 2406.06484",
)
class DeltaNet(LinearMixer):
    """S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ (arXiv 2406.06484).

    Gated DeltaNet without decay and output gate: the state forgets only what it replaces.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        head_dim: Size K = V of a head; hidden_size / num_heads by default.
        qk: Features of queries and keys.
        v: Features of values.
        beta_bias: Whether β's projection has a bias.
        allow_neg_eigval: Let β reach 2, so that a transition can also reflect (arXiv 2411.12537).
        norm_eps: Added inside the root of the output norm.
    """

    recurrence = staticmethod(kernels.delta_rule)
    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        qk: Features = Features(4, activation="silu", norm="l2"),
        v: Features = Features(4, activation="silu"),
        beta_bias: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
    ):
        num_heads, head_dim = checked_site(site, type(self)).heads(num_heads, head_dim)
        check_numbers({"norm_eps": norm_eps}, positive=False)
        super().__init__(site, num_heads=num_heads, key_size=head_dim, value_size=head_dim, q=qk, k=qk, v=v)
        width = num_heads * head_dim
        self.in_proj = Projection(site.hidden_size, {"q": width, "k": width, "v": width, "b": self.gate_heads})
        self.o_norm = RMSNorm(head_dim, eps=norm_eps)
        self.o_proj = OutputProjection(width, site.hidden_size)
        self.beta = Strength(self.gate_heads, bias=beta_bias, allow_neg_eigval=allow_neg_eigval)

    def project(self, x: Tensor) -> Streams:
        q, k, v, b = self.in_proj(x)
        H = self.num_heads
        return Streams(split_heads(q, H), split_heads(k, H), split_heads(v, H), beta=b)

    def gates(self, s: Streams) -> Streams:
        assert s.beta is not None
        return s.replace(beta=self.beta(s.beta))

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        assert s.beta is not None
        if not self.beta.fused or type(self.o_norm) is not RMSNorm:
            return None
        norm = kernels.GatedNorm(None, self.o_norm.scale, self.o_norm.eps)
        beta = kernels.Strength(s.beta, self.beta.bias, self.beta.most)
        return kernels.TokenOps(beta=beta, norm=norm)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o).flatten(2))
