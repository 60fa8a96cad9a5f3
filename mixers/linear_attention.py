"""Linear attention."""

from torch import Tensor

import kernels

from .arguments import check_numbers
from .base import LinearMixer, Site, Streams, checked_site
from .features import Features
from .norm import RMSNorm
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(recurrence="S_t = S_{t−1} + φ(k_t) v_tᵀ", paper="Transformers are RNNs, arXiv 2006.16236")
class LinearAttention(LinearMixer):
    """S_t = S_{t−1} + φ(k_t) v_tᵀ, with a norm instead of the denominator (arXiv 2006.16236, 2210.10340).

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        head_dim: Size K = V of a head; hidden_size / num_heads by default.
        qk: Features of queries and keys, φ: activation elu1 (1 + ELU), relu or identity.
        norm_eps: Added inside the root of the output norm.
    """

    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        qk: Features = Features(activation="elu1"),
        norm_eps: float = 1e-5,
    ):
        num_heads, head_dim = checked_site(site, type(self)).heads(num_heads, head_dim)
        check_numbers({"norm_eps": norm_eps}, positive=False)
        super().__init__(site, num_heads=num_heads, key_size=head_dim, value_size=head_dim, q=qk, k=qk)
        width = num_heads * head_dim
        self.in_proj = Projection(site.hidden_size, {"q": width, "k": width, "v": width})
        self.o_norm, self.o_proj = RMSNorm(head_dim, eps=norm_eps), OutputProjection(width, site.hidden_size)

    def project(self, x: Tensor) -> Streams:
        q, k, v = (split_heads(stream, self.num_heads) for stream in self.in_proj(x))
        return Streams(q, k, v)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        if type(self.o_norm) is not RMSNorm:
            return None
        norm = kernels.GatedNorm(None, self.o_norm.scale, self.o_norm.eps)
        return kernels.TokenOps(norm=norm)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o).flatten(2))
