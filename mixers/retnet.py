"""RetNet."""

import math

from torch import Tensor

from kernels import TokenOps, UserError

from .arguments import check_numbers
from .base import LinearMixer, Site, Streams, checked_site
from .decay import ConstantDecay
from .features import Features, Rotary
from .norm import GatedRMSNorm, NormOnly, Output
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(recurrence="S_t = γ_h S_{t−1} + k_t v_tᵀ", paper="Retentive network, arXiv 2307.08621")
class RetNet(LinearMixer):
    """S_t = γ_h S_{t−1} + k_t v_tᵀ with γ_h = 1 − 2^(−5−h) (arXiv 2307.08621).

    With S subheads the decays of a head are 1 − 2^(−5−n/S) for n = 0 … H·S − 1, which keeps their range; otherwise
    most subheads would never forget.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        head_dim: Key size K of a head; hidden_size / num_heads by default.
        expand_v: Value size over key size.
        qk: Features of queries and keys.
        output_gate: Whether SiLU of a projection multiplies the output after its norm.
        norm_eps: Added inside the root of the output norm. The default is that of the paper; with 1e-3, first tokens
            whose q·k is near zero do not dominate the first gradients (configs/sweep/norm_eps.yaml).
    """

    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2,
        qk: Features = Features(map=Rotary),
        output_gate: bool = True,
        norm_eps: float = 1e-5,
    ):
        num_heads, head_dim = checked_site(site, type(self)).heads(num_heads, head_dim)
        check_numbers({"expand_v": expand_v})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        value_dim = round(expand_v * head_dim)
        if not value_dim:
            raise UserError(f"expand_v: {expand_v} of head_dim {head_dim} leaves no values")
        super().__init__(site, num_heads=num_heads, key_size=head_dim, value_size=value_dim, q=qk, k=qk)
        self.decay = ConstantDecay([math.log1p(-(2.0 ** (-5 - n / self.subheads))) for n in range(self.gate_heads)])
        keys, values = num_heads * head_dim, num_heads * value_dim
        gate = {"g": values} if output_gate else {}
        self.in_proj = Projection(site.hidden_size, {"q": keys, "k": keys, "v": values, **gate})
        self.o_norm: Output = (GatedRMSNorm if output_gate else NormOnly)(value_dim, eps=norm_eps)
        self.o_proj = OutputProjection(values, site.hidden_size)

    @classmethod
    def sized_like(cls, num_heads: int, head_dim: int, hidden_size: int) -> dict[str, object]:
        return {"num_heads": num_heads, "head_dim": head_dim, "expand_v": 1.0}

    def project(self, x: Tensor) -> Streams:
        q, k, v, *g = (split_heads(stream, self.num_heads) for stream in self.in_proj(x))
        return Streams(q, k, v, gate=g[0] if g else None)

    def gates(self, s: Streams) -> Streams:
        return s.replace(log_decay=self.decay(s.v))

    def token_ops(self, s: Streams) -> TokenOps | None:
        if (norm := self.o_norm.gated_norm(s.gate)) is None:
            return None
        return TokenOps(decay=self.decay(s.v), norm=norm)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))
