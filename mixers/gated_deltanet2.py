"""Gated DeltaNet-2."""

from collections.abc import Callable

from torch import Tensor

import kernels
from kernels.activation_gate import activation_gate

from .arguments import size_or
from .base import LinearMixer, Site, Streams, checked_site
from .decay import ChannelDecay, Strength
from .features import Features
from .growth import MergedLowRank
from .norm import Output, SigmoidGatedRMSNorm
from .projection import Linear, OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = (I − k_t (b_t ⊙ k_t)ᵀ) diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ",
    paper="Gated DeltaNet-2, arXiv 2605.22791",
)
class GatedDeltaNet2(LinearMixer):
    """S_t = (I − k_t (b_t ⊙ k_t)ᵀ) diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ (arXiv 2605.22791).

    KDA with two gates in place of β: b chooses which channels of the key erase, and w which channels of the value are
    written. The decays and b belong to key heads. The step is not symmetric, so its norm can exceed 1.

    Args:
        site: Where the layer sits in the model.
        num_heads: Value heads; the model's by default.
        head_dim: Key size K of a head; hidden_size / num_heads by default.
        value_dim: Value size V of a head; K by default.
        num_key_heads: Key heads, shared by groups of value heads; num_heads by default.
        qk: Features of queries and keys.
        v: Features of values.
        decay: The module that computes the decays: ChannelDecay, or BoundedChannelDecay.
        rank: Rank of the projections of the decays and of the output gate; V by default.
        output: Norm and gate of the output: SigmoidGatedRMSNorm, or another Output.
        allow_neg_eigval: Let b reach 2, so that a transition can also reflect (arXiv 2411.12537).
    """

    recurrence = staticmethod(kernels.delta_rule)
    fused_token = True
    decay_per_channel = erase_keys = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        qk: Features = Features(4, activation="silu", norm="l2"),
        v: Features = Features(4, activation="silu"),
        decay: Callable[[int, int], ChannelDecay] = ChannelDecay,
        rank: int | None = None,
        output: Callable[[int], Output] = SigmoidGatedRMSNorm,
        allow_neg_eigval: bool = False,
    ):
        site = checked_site(site, type(self))
        num_heads, head_dim, value_dim = site.head_sizes(num_heads, head_dim, value_dim)
        super().__init__(
            site,
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            key_size=head_dim,
            value_size=value_dim,
            q=qk,
            k=qk,
            v=v,
        )
        keys, values, rank = self.num_key_heads * head_dim, num_heads * value_dim, size_or("rank", rank, value_dim)
        heads = self.num_key_heads * self.subheads
        channels = heads * self.subhead_size
        self.o_norm = output(value_dim)
        widths = {"q": keys, "k": keys, "v": values, "f": rank, "b": channels, "w": values, "g": rank}
        if not self.o_norm.gated:
            del widths["g"]
        self.in_proj = Projection(site.hidden_size, widths)
        self.decay_up = Linear(rank, channels, bias=False)
        self.decay = decay(heads, self.subhead_size)
        self.erase = Strength(channels, allow_neg_eigval=allow_neg_eigval)
        self.g_up = Linear(rank, values) if self.o_norm.gated else None
        self.o_proj = OutputProjection(values, site.hidden_size)

    def heads_of(self, parameter: str) -> int:
        if parameter.startswith(("in_proj.b.", "decay")):
            return self.num_key_heads
        return super().heads_of(parameter)

    def project(self, x: Tensor) -> Streams:
        q, k, v, f, b, w, *g = self.in_proj(x)
        G, H = self.num_key_heads, self.num_heads
        gate = None if self.g_up is None else split_heads(self.g_up(g[0]), H)
        q, k, v = split_heads(q, G), split_heads(k, G), split_heads(v, H)
        return Streams(q, k, v, self.decay_up(f), w, gate, b)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        assert s.beta is not None
        assert s.erase is not None
        log_decay = self.to_value_heads(self.decay(s.log_decay))
        erase = activation_gate(s.erase, largest=self.erase.most).view(s.k.shape).to(s.k.dtype)
        v = activation_gate(s.beta, s.v.flatten(2)).view(s.v.shape)
        return s.replace(v=v, log_decay=log_decay, beta=self.to_value_heads(erase), erase=None)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        assert s.log_decay is not None
        assert s.beta is not None
        assert s.erase is not None
        norm = self.o_norm.gated_norm(s.gate)
        if norm is None or not (self.decay.fused and self.erase.fused) or self.num_key_heads < self.num_heads:
            return None
        raw, bound = split_heads(s.log_decay, self.gate_heads), self.decay.lower_bound
        decay = kernels.GateInputs(raw, self.decay.A_log, self.decay.biases, None, lower_bound=bound)
        return kernels.TokenOps(decay=decay, beta=kernels.ChannelStrength(s.erase, s.beta, self.erase.most), norm=norm)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class MergedGatedDeltaNet2(MergedLowRank):
    """Gated DeltaNet-2: channels also keep their gates."""

    grows = GatedDeltaNet2
