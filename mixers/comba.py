"""Comba."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid

from .arguments import check_numbers
from .base import LinearMixer, Site, Streams, checked_site
from .decay import Discretisation, Strength
from .features import Features
from .growth import MergedSizes
from .norm import Output, SigmoidGatedRMSNorm
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="S_t = (exp(g_t) I − β_t k_t p_tᵀ) S_{t−1} + β_t k_t v_tᵀ,  p_t = σ(f) k_t",
    paper="Comba, arXiv 2506.02475",
)
class Comba(LinearMixer):
    """S_t = (exp(g_t) I − β_t k_t p_tᵀ) S_{t−1} + β_t k_t v_tᵀ with p = σ(f) k, read with q − D p (arXiv 2506.02475).

    The feedback p reads the state before it decays. f and D are one number per key head. Queries and keys have length
    one after the correction of q.

    Args:
        site: Where the layer sits in the model.
        num_heads: Value heads; the model's by default.
        head_dim: Key size K of a head; hidden_size / num_heads by default.
        value_dim: Value size V of a head; K by default.
        num_key_heads: Key heads, shared by groups of value heads; num_heads by default.
        qk: Features of queries and keys, before they are corrected and brought to length one.
        v: Features of values.
        decay: The module that computes the decays.
        output: Norm and gate of the output: SigmoidGatedRMSNorm, or another Output.
        correction: Initial D; the paper's 1, or 0.02 for small models. Null for none.
        unit_feedback: Whether p is brought to length one, so that σ(f) acts on the correction of q only. That is what
            the kernels of flash-linear-attention do, and what models trained with them expect.
    """

    recurrence = staticmethod(kernels.delta_rule)
    erase_keys = read_before = True
    fused_token = True
    no_weight_decay = keep_fp32 = ("feedback", "D")

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        qk: Features = Features(4, activation="silu"),
        v: Features = Features(4, activation="silu"),
        decay: Callable[[int], Discretisation] = Discretisation,
        output: Callable[[int], Output] = SigmoidGatedRMSNorm,
        correction: float | None = 1.0,
        unit_feedback: bool = False,
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
        check_numbers({"correction": correction}, positive=False)
        if unit_feedback and correction is None:
            raise kernels.UserError("correction: null needs unit_feedback=false, or σ(f) has no effect")
        keys, values, heads = self.num_key_heads * head_dim, num_heads * value_dim, self.num_key_heads * self.subheads
        self.correction, self.unit_feedback = correction, unit_feedback
        self.o_norm = output(value_dim)
        widths = {"q": keys, "k": keys, "v": values, "g": values, "a": self.gate_heads, "b": self.gate_heads}
        if not self.o_norm.gated:
            del widths["g"]
        self.in_proj = Projection(site.hidden_size, widths)
        self.decay, self.beta = decay(self.gate_heads), Strength(self.gate_heads)
        self.feedback = nn.Parameter(torch.empty(heads))
        self.D = None if correction is None else nn.Parameter(torch.empty(heads))
        self.o_proj = OutputProjection(values, site.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.feedback)
        if self.D is not None and self.correction is not None:
            nn.init.constant_(self.D, self.correction)

    def heads_of(self, parameter: str) -> int:
        return self.num_key_heads if parameter in ("feedback", "D") else super().heads_of(parameter)

    def project(self, x: Tensor) -> Streams:
        parts = dict(zip(self.in_proj.widths, self.in_proj(x), strict=True))
        G, H = self.num_key_heads, self.num_heads
        q, k, v = split_heads(parts["q"], G), split_heads(parts["k"], G), split_heads(parts["v"], H)
        gate = split_heads(parts["g"], H) if "g" in parts else None
        return Streams(q, k, v, parts["a"], parts["b"], gate)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        assert s.beta is not None
        strength = sigmoid(self.feedback)[:, None]
        q = s.q if self.D is None else (s.q - self.D[:, None] * strength * s.k).to(s.q.dtype)
        q, k = (kernels.features(x, norm="l2")[0] for x in (q, s.k))
        p = self.to_value_heads(k if self.unit_feedback else (strength * k).to(k.dtype))
        log_decay, beta = self._decay_and_beta(s.log_decay, s.beta)
        return s.replace(q=q, k=k, log_decay=log_decay, beta=beta, erase=p)

    def _decay_and_beta(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if self.decay.fused:
            return kernels.delta_gates(a, self.decay.A_log, self.decay.dt_bias, b, largest=self.beta.most)
        return self.decay(a)[0], self.beta(b)

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        assert s.log_decay is not None
        norm = self.o_norm.gated_norm(s.gate)
        if norm is None or not (self.decay.fused and self.beta.fused):
            return None
        decay = kernels.GateInputs(s.log_decay, self.decay.A_log, self.decay.dt_bias, s.beta, largest=self.beta.most)
        feedback = kernels.Feedback(self.feedback, self.D, self.unit_feedback)
        return kernels.TokenOps(decay=decay, norm=norm, feedback=feedback)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class MergedComba(MergedSizes):
    """Comba: also one feedback and one correction."""

    grows = Comba
