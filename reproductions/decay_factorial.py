"""Mixers that differ in their decays and in the delta rule, and in nothing else, for `decay_factorial.yaml`.

Queries, keys, values, write strengths, the output gate and the norm are those of `GatedDeltaNet`. The log decay of a
head, or of each of its key channels, is −A · softplus(f + b), or bounded: −5 · σ(f + b). Both start at −A · dt, with A
uniform in [low, high] for each head, and dt log-uniform in [1e-3, 0.1] for each number. Without the delta rule, the
write strength multiplies the value.
"""

import torch
from torch import Tensor, nn

from kernels.core.recurrence import at_least_fp32
from mixers import Features, GatedRMSNorm, LinearMixer, OutputProjection, Projection, Site, Streams
from mixers.decay import start_steps
from mixers.projection import split_heads

BOUND = 5.0  # of a bounded log decay


class StartedDecay(nn.Module):
    """Log decays of inputs [..., heads, size]."""

    def __init__(self, heads: int, size: int, low: float, high: float, *, bounded: bool):
        super().__init__()
        self.low, self.high, self.bounded = low, high, bounded
        self.A_log, self.bias = nn.Parameter(torch.empty(heads, 1)), nn.Parameter(torch.empty(heads, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.bias.is_meta:
            return
        self.A_log.uniform_(self.low, self.high).clamp_(min=1e-4).log_()
        start_steps(self.bias)
        if self.bounded:
            share = self.A_log.exp() * nn.functional.softplus(self.bias) / BOUND
            self.bias.copy_(share.clamp(max=0.9).logit())
            self.A_log.zero_()

    def forward(self, f: Tensor) -> Tensor:
        f, rate = at_least_fp32(f) + at_least_fp32(self.bias), at_least_fp32(self.A_log).exp()
        return -BOUND * (rate * f).sigmoid() if self.bounded else -rate * nn.functional.softplus(f)


class DecayPerHead(LinearMixer):
    """One decay for each head.

    Args:
        site: Where the layer sits in the model.
        head_dim, value_dim: Sizes of a head.
        delta: Whether a value replaces what its key has stored, instead of being added.
        bounded: Whether a log decay is at least −5.
        low, high: Range of the rates A at the start.
    """

    keep_fp32 = no_weight_decay = ("A_log", "bias")

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int,
        value_dim: int,
        delta: bool,
        bounded: bool,
        low: float,
        high: float,
    ):
        features = Features(4, activation="silu", norm="l2")
        super().__init__(
            site,
            num_heads=site.num_heads,
            key_size=head_dim,
            value_size=value_dim,
            q=features,
            k=features,
            v=Features(4, activation="silu"),
        )
        keys, values, heads = site.num_heads * head_dim, site.num_heads * value_dim, self.gate_heads
        self.delta, size = delta, self.subhead_size if self.decay_per_channel else 1
        writes = heads if delta else self.num_heads
        widths = {"q": keys, "k": keys, "v": values, "g": values, "f": heads * size, "b": writes}
        self.in_proj = Projection(site.hidden_size, widths)
        self.decay = StartedDecay(heads, size, low, high, bounded=bounded)
        self.o_norm, self.o_proj = GatedRMSNorm(value_dim), OutputProjection(values, site.hidden_size)

    def project(self, x: Tensor) -> Streams:
        q, k, v, g, f, b = self.in_proj(x)
        q, k, v, g = (split_heads(part, self.num_heads) for part in (q, k, v, g))
        return Streams(q, k, v, f, b, g)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        assert s.beta is not None
        log_decay, beta = self.decay(split_heads(s.log_decay, self.gate_heads)), at_least_fp32(s.beta).sigmoid()
        if not self.decay_per_channel:
            log_decay = log_decay.squeeze(-1)
        if self.delta:
            return s.replace(log_decay=log_decay, beta=beta)
        return s.replace(v=(s.v * beta[..., None]).to(s.v.dtype), log_decay=log_decay, beta=None)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.o_norm(o, s.gate).flatten(2))


class DecayPerChannel(DecayPerHead):
    """A decay for each key channel."""

    decay_per_channel = True
