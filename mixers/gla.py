"""Gated linear attention."""

from torch import Tensor

import kernels

from .arguments import check_numbers, check_sizes
from .base import LinearMixer, Site, Streams, checked_site
from .decay import LowRankDecay
from .features import Features
from .growth import MergedHeads
from .norm import GatedRMSNorm, NormOnly, Output
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = diag(α_t) S_{t−1} + k_t v_tᵀ",
    paper="Gated linear attention transformers, arXiv 2312.06635",
)
class GLA(LinearMixer):
    """S_t = diag(α_t) S_{t−1} + k_t v_tᵀ with α_t = σ(W₂ W₁ x_t + b)^(1/16) (arXiv 2312.06635).

    The defaults are those of the paper; Liu et al. (state expansion) train it with `expand_k: 1` and a short
    convolution with SiLU on q, k and v.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        expand_k: Width of all keys over hidden_size.
        expand_v: Width of all values over hidden_size.
        gate_rank: Rank of the projection that makes the decay.
        gate_normalizer: Divides the log of the decay; 16 makes the state forget slowly.
        qk: Features of queries and keys.
        v: Features of values.
        output_gate: Whether SiLU of a projection multiplies the output after its norm.
        norm_eps: Added inside the root of the output norm. The default is that of the paper; with 1e-3, first tokens
            whose q·k is near zero do not dominate the first gradients (configs/sweep/norm_eps.yaml).
    """

    decay_per_channel = True
    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        qk: Features = Features(),
        v: Features = Features(),
        output_gate: bool = True,
        norm_eps: float = 1e-5,
    ):
        num_heads, _ = checked_site(site, type(self)).heads(num_heads)
        check_sizes({"gate_rank": gate_rank})
        check_numbers({"expand_k": expand_k, "expand_v": expand_v, "gate_normalizer": gate_normalizer})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        keys, values = round(site.hidden_size * expand_k), round(site.hidden_size * expand_v)
        for name, width in (("expand_k", keys), ("expand_v", values)):
            if not width or width % num_heads:
                raise kernels.UserError(f"{name}: a width of {width} cannot be divided into {num_heads} heads")
        key_size, value_size = keys // num_heads, values // num_heads
        super().__init__(site, num_heads=num_heads, key_size=key_size, value_size=value_size, q=qk, k=qk, v=v)
        self.gate_normalizer = gate_normalizer
        widths = {"q": keys, "k": keys, "v": values, "g": values, "decay": gate_rank}
        if not output_gate:
            del widths["g"]
        self.in_proj = Projection(site.hidden_size, widths)
        self.decay_up = LowRankDecay(gate_rank, self.gate_heads * self.subhead_size)
        self.o_norm: Output = (GatedRMSNorm if output_gate else NormOnly)(value_size, eps=norm_eps)
        self.o_proj = OutputProjection(values, site.hidden_size)

    @classmethod
    def sized_like(cls, num_heads: int, head_dim: int, hidden_size: int) -> dict[str, object]:
        return {"num_heads": num_heads, **dict.fromkeys(("expand_k", "expand_v"), num_heads * head_dim / hidden_size)}

    def project(self, x: Tensor) -> Streams:
        q, k, v, *g, decay = self.in_proj(x)
        H = self.num_heads
        gate = split_heads(g[0], H) if g else None
        return Streams(split_heads(q, H), split_heads(k, H), split_heads(v, H), decay, gate=gate)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        log_decay = self.decay_up(s.log_decay, self.gate_normalizer)
        return s.replace(log_decay=split_heads(log_decay, self.gate_heads))

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        if (norm := self.o_norm.gated_norm(s.gate)) is None:
            return None
        return kernels.TokenOps(decay=self.gates(s).log_decay, norm=norm)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class MergedGLA(MergedHeads):
    """GLA: keys and values have fixed widths, which fewer heads share."""

    grows = GLA

    def merged(self, factor: int) -> dict[str, object]:
        return {"num_heads": self.mixer.num_heads // factor}
