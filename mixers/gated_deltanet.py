"""Gated DeltaNet."""

from collections.abc import Callable

from torch import Tensor

import kernels

from .base import LinearMixer, Site, Streams, checked_site
from .decay import Discretisation, Strength
from .features import Features
from .fusion import Fusable
from .growth import MergedSizes
from .norm import GatedRMSNorm, Output
from .preconditioner import Preconditioner, curvature_gates
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = exp(g_t)(I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ",
    paper="Gated Delta Networks, arXiv 2412.06464",
)
class GatedDeltaNet(LinearMixer, Fusable):
    """S_t = exp(g_t)(I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ (arXiv 2412.06464).

    The state decays by exp(g_t), and the fraction β_t of its value for the key k_t is replaced. Queries, keys and
    values pass through a short convolution and SiLU; queries and keys have length one. By default H·K = hidden and
    V = K.

    Args:
        site: Where the layer sits in the model.
        num_heads: Value heads; the model's by default.
        head_dim: Key size K of a head; hidden_size / num_heads by default.
        value_dim: Value size V of a head; K by default.
        num_key_heads: Key heads, shared by groups of value heads; num_heads by default.
        qk: Features of queries and keys.
        v: Features of values.
        decay: The module that computes the decays; null for no decay (the plain delta rule).
        output: Norm and gate of the output: GatedRMSNorm, NormOnly, GateOnly, or a subclass of Output.
        beta_bias: Whether β's projection has a bias.
        allow_neg_eigval: Let β reach 2, so that a transition can also reflect (arXiv 2411.12537).
        preconditioner: The module that preconditions the keys that are written with: Preconditioner (arXiv
            2604.21100); null for none.
    """

    recurrence = staticmethod(kernels.delta_rule)
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
        decay: Callable[[int], Discretisation] | None = Discretisation,
        output: Callable[[int], Output] = GatedRMSNorm,
        beta_bias: bool = False,
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
        self.decay = None if decay is None else decay(self.gate_heads)
        self.o_norm = output(value_dim)
        keys, values = self.num_key_heads * head_dim, num_heads * value_dim
        widths = {"q": keys, "k": keys, "v": values, "g": values, "a": self.gate_heads, "b": self.gate_heads}
        if not self.o_norm.gated:
            del widths["g"]
        if self.decay is None:
            del widths["a"]
        if self.preconditioner is not None:
            widths |= self.preconditioner.widths
        self.in_proj = Projection(site.hidden_size, widths)
        self.o_proj = OutputProjection(values, site.hidden_size)
        self.beta = Strength(self.gate_heads, bias=beta_bias, allow_neg_eigval=allow_neg_eigval)

    def project(self, x: Tensor) -> Streams:
        parts = dict(zip(self.in_proj.widths, self.in_proj(x), strict=True))
        G, H = self.num_key_heads, self.num_heads
        q, k, v = split_heads(parts["q"], G), split_heads(parts["k"], G), split_heads(parts["v"], H)
        gate = split_heads(parts["g"], H) if "g" in parts else None
        return Streams(q, k, v, parts.get("a"), parts["b"], gate, curvature=curvature_gates(parts))

    def gate_inputs(self, s: Streams) -> kernels.GateInputs | None:
        if not self.fused or self.decay is None or not (self.decay.fused and self.beta.fused):
            return None
        assert s.log_decay is not None
        assert s.beta is not None
        decay, beta = self.decay, self.beta
        return kernels.GateInputs(s.log_decay, decay.A_log, decay.dt_bias, s.beta, beta.bias, beta.most)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        gates, norm = self.gate_inputs(s), self.o_norm.gated_norm(s.gate)
        if gates is None or norm is None:
            return None
        return kernels.TokenOps(decay=gates, norm=norm)

    def gates(self, s: Streams) -> Streams:
        assert s.beta is not None
        log_decay = None if self.decay is None or s.log_decay is None else self.decay(s.log_decay)[0]
        return s.replace(log_decay=log_decay, beta=self.beta(s.beta))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class MergedGatedDeltaNet(MergedSizes):
    """Gated DeltaNet."""

    grows = GatedDeltaNet
