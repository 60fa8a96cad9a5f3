"""Gated DeltaProduct."""

from collections.abc import Callable

from torch import Tensor

import kernels

from .arguments import check_sizes
from .base import LinearMixer, Site, Streams, checked_site
from .decay import Discretisation, Strength
from .features import Features
from .growth import MergedSizes
from .norm import GatedRMSNorm, Output
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = exp(g_t) S_{t−1}, then n times S_t ← S_t + β_{t,j} k_{t,j} (v_{t,j} − S_tᵀ k_{t,j})ᵀ",
    paper="DeltaProduct, arXiv 2502.10297",
)
class GatedDeltaProduct(LinearMixer):
    """S_t = exp(g_t) S_{t−1}, then n times S_t ← S_t + β_{t,j} k_{t,j} (v_{t,j} − S_tᵀ k_{t,j})ᵀ (arXiv 2502.10297).

    Gated DeltaNet with n steps per token; each step has a key, a value and a strength β. The transition of a token is a
    product of n reflections, which can permute n + 1 items. Time grows with n, the state does not.

    Args:
        site: Where the layer sits in the model.
        num_steps: Steps n per token.
        num_heads: Value heads; the model's by default.
        head_dim: Key size K of a head; hidden_size / num_heads by default.
        value_dim: Value size V of a head; K by default.
        num_key_heads: Key heads, shared by groups of value heads; num_heads by default.
        qk: Features of queries and keys.
        v: Features of values.
        decay: The module that computes the decays; null for no decay (DeltaProduct).
        output: Norm and gate of the output: GatedRMSNorm, NormOnly, GateOnly, or a subclass of Output.
        allow_neg_eigval: Let β reach 2, so that a step can also reflect (arXiv 2411.12537).
    """

    recurrence = staticmethod(kernels.delta_rule)
    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_steps: int = 2,
        num_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        qk: Features = Features(4, activation="silu", norm="l2"),
        v: Features = Features(4, activation="silu"),
        decay: Callable[[int], Discretisation] | None = Discretisation,
        output: Callable[[int], Output] = GatedRMSNorm,
        allow_neg_eigval: bool = True,
    ):
        site = checked_site(site, type(self))
        check_sizes({"num_steps": num_steps})
        num_heads, head_dim, value_dim = site.head_sizes(num_heads, head_dim, value_dim)
        super().__init__(
            site,
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            key_size=head_dim,
            value_size=value_dim,
            steps=num_steps,
            q=qk,
            k=qk,
            v=v,
        )
        keys, values, n = self.num_key_heads * head_dim, num_heads * value_dim, num_steps
        self.decay = None if decay is None else decay(self.gate_heads)
        self.o_norm = output(value_dim)
        widths = {
            "q": keys,
            "k": n * keys,
            "v": n * values,
            "g": values,
            "a": self.gate_heads,
            "b": n * self.gate_heads,
        }
        if not self.o_norm.gated:
            del widths["g"]
        if self.decay is None:
            del widths["a"]
        self.in_proj = Projection(site.hidden_size, widths)
        self.beta = Strength(n * self.gate_heads, allow_neg_eigval=allow_neg_eigval)
        self.o_proj = OutputProjection(values, site.hidden_size)

    def heads_of(self, parameter: str) -> int:
        return self.steps * self.num_heads if parameter.startswith("in_proj.b.") else super().heads_of(parameter)

    def project(self, x: Tensor) -> Streams:
        parts = dict(zip(self.in_proj.widths, self.in_proj(x), strict=True))
        G, H, n = self.num_key_heads, self.num_heads, self.steps
        q, k, v = split_heads(parts["q"], G), split_heads(parts["k"], n * G), split_heads(parts["v"], n * H)
        gate = split_heads(parts["g"], H) if "g" in parts else None
        return Streams(q, k, v, parts.get("a"), parts["b"], gate)

    def gates(self, s: Streams) -> Streams:
        assert s.beta is not None
        log_decay = None if self.decay is None or s.log_decay is None else self.decay(s.log_decay)[0]
        return s.replace(log_decay=log_decay, beta=self.steps_of(self.beta(s.beta)))

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        assert s.beta is not None
        norm, decay = self.o_norm.gated_norm(s.gate), None
        if norm is None or not self.beta.fused or (self.decay is not None and not self.decay.fused):
            return None
        if self.decay is not None and s.log_decay is not None:
            decay = kernels.GateInputs(s.log_decay, self.decay.A_log, self.decay.dt_bias, None)
        return kernels.TokenOps(decay=decay, beta=kernels.Strength(s.beta, self.beta.bias, self.beta.most), norm=norm)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class MergedGatedDeltaProduct(MergedSizes):
    """Gated DeltaProduct: within each step."""

    grows = GatedDeltaProduct
