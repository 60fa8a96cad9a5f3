"""Kimi Delta Attention (KDA)."""

from collections.abc import Callable

from torch import Tensor

import kernels

from .arguments import size_or
from .base import LinearMixer, Site, Streams, checked_site
from .decay import ChannelDecay, Strength
from .features import Features
from .fusion import Fusable
from .growth import MergedLowRank
from .norm import Output, SigmoidGatedRMSNorm
from .preconditioner import Preconditioner, curvature_gates
from .projection import Linear, OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = (I − β_t k_t k_tᵀ) diag(α_t) S_{t−1} + β_t k_t v_tᵀ",
    paper="Kimi Linear, arXiv 2510.26692",
)
class KDA(LinearMixer, Fusable):
    """S_t = (I − β_t k_t k_tᵀ) diag(α_t) S_{t−1} + β_t k_t v_tᵀ, Kimi Delta Attention (arXiv 2510.26692).

    Gated DeltaNet with one decay α_t per key channel. The decays and the output gate are made by projections of low
    rank, or of full rank: only the gate in Kimi K3, both in Ling 3.0. Queries, keys and values pass through a short
    convolution and SiLU; queries and keys have length one.

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
        full_rank_decay: Whether one matrix makes the decays from x, without `rank`.
        full_rank_gate: Whether one matrix, without a bias, makes the output gate from x.
        output: Norm and gate of the output: SigmoidGatedRMSNorm, or another Output.
        gate_bias: Whether the output gate has a bias; that of the published Kimi Linear has none.
        allow_neg_eigval: Let β reach 2, so that a transition can also reflect (arXiv 2411.12537).
        preconditioner: The module that preconditions the keys that are written with: Preconditioner (arXiv
            2604.21100); null for none.
    """

    recurrence = staticmethod(kernels.delta_rule)
    decay_per_channel = True
    fused_method = "gates"
    fused_token = True

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
        full_rank_decay: bool = False,
        full_rank_gate: bool = False,
        output: Callable[[int], Output] = SigmoidGatedRMSNorm,
        gate_bias: bool = True,
        allow_neg_eigval: bool = False,
        preconditioner: Callable[[int], Preconditioner] | None = None,
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
            preconditioner=preconditioner,
        )
        keys, values = self.num_key_heads * head_dim, num_heads * value_dim
        channels = self.gate_heads * self.subhead_size
        if full_rank_gate and gate_bias:
            raise kernels.UserError("gate_bias: True needs a gate of low rank; set it to false with full_rank_gate")
        if full_rank_decay and full_rank_gate and rank is not None:
            raise kernels.UserError(f"rank: {rank!r} has no effect where decay and gate have full rank; leave it out")
        rank = size_or("rank", rank, value_dim)
        self.full_rank_decay, self.full_rank_gate = full_rank_decay, full_rank_gate
        self.o_norm = output(value_dim)
        gates = {"f": channels if full_rank_decay else rank, "b": self.gate_heads}
        widths = {"q": keys, "k": keys, "v": values, **gates, "g": values if full_rank_gate else rank}
        if not self.o_norm.gated:
            del widths["g"]
        if self.preconditioner is not None:
            widths |= self.preconditioner.widths
        self.in_proj = Projection(site.hidden_size, widths)
        self.decay_up = None if full_rank_decay else Linear(rank, channels, bias=False)
        self.decay = decay(self.gate_heads, self.subhead_size)
        self.beta = Strength(self.gate_heads, allow_neg_eigval=allow_neg_eigval)
        self.g_up = Linear(rank, values, bias=gate_bias) if self.o_norm.gated and not full_rank_gate else None
        self.o_proj = OutputProjection(values, site.hidden_size)

    def project(self, x: Tensor) -> Streams:
        parts = dict(zip(self.in_proj.widths, self.in_proj(x), strict=True))
        G, H = self.num_key_heads, self.num_heads
        q, k, v = split_heads(parts["q"], G), split_heads(parts["k"], G), split_heads(parts["v"], H)
        gate = None
        if self.o_norm.gated:
            gate = split_heads(parts["g"] if self.g_up is None else self.g_up(parts["g"]), H)
        return Streams(q, k, v, parts["f"], parts["b"], gate, curvature=curvature_gates(parts))

    def gate_inputs(self, s: Streams) -> kernels.GateInputs | None:
        if not (self.fused and self.decay.fused and self.beta.fused):
            return None
        assert s.log_decay is not None
        assert s.beta is not None
        decay, raw, up = self.decay, s.log_decay, None
        if self.decay_up is None:
            raw = split_heads(raw, self.gate_heads)
        else:
            up = self.decay_up.weight
        inputs = (raw, decay.A_log, decay.biases, s.beta)
        return kernels.GateInputs(*inputs, largest=self.beta.most, up=up, lower_bound=decay.lower_bound)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        gates, norm = self.gate_inputs(s), self.o_norm.gated_norm(s.gate)
        if gates is None or norm is None:
            return None
        return kernels.TokenOps(decay=gates, norm=norm)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        assert s.beta is not None
        f = s.log_decay if self.decay_up is None else self.decay_up(s.log_decay)
        return s.replace(log_decay=self.decay(f), beta=self.beta(s.beta))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class MergedKDA(MergedLowRank):
    """KDA."""

    grows = KDA
