"""Gates: the decay, data-dependent as in Mamba2 and Gated DeltaNet or constant as in TNL and RetNet, and β."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

import kernels
from kernels.delta_gates import channel_decay, strength
from kernels.trapezoid_token import trapezoid

from .arguments import check_numbers, check_sizes
from .fusion import Fusable
from .precision import KeepsFp32


def start_steps(dt_bias: Tensor) -> None:
    """Draw biases whose softplus is log-uniform in [1e-3, 0.1]; call it without gradients."""
    dt = dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
    dt_bias.add_(torch.log(-torch.expm1(-dt)))  # the inverse of softplus


class Discretisation(KeepsFp32, Fusable):
    """dt = softplus(a + dt_bias) and log_decay = −exp(A_log) · dt, in at least fp32.

    A starts uniform in [low, high]; dt starts log-uniform in [1e-3, 0.1] (Mamba2, arXiv 2405.21060).

    Args:
        size: Number of recurrences.
        low: Smallest initial A; Gated DeltaNet's 0 by default.
        high: Largest initial A.
    """

    no_weight_decay = keep_fp32 = ("A_log", "dt_bias")

    def __init__(self, size: int, low: float = 0.0, high: float = 16.0):
        super().__init__()
        check_sizes({"size": size})
        _check_range(low, high)
        self.low, self.high = low, high
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log.is_meta:  # it has no values, and for these formulas PyTorch would import its compiler
            return
        _start_rates(self.A_log, self.low, self.high)
        start_steps(self.dt_bias)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """a [...,size] → log_decay and dt, the same shape."""
        return kernels.discretise(a, self.A_log, self.dt_bias)


class Mamba2Discretisation(Discretisation):
    """`Discretisation` with Mamba2's smallest initial A.

    Args:
        size: Number of recurrences.
        low: Smallest initial A.
        high: Largest initial A.
    """

    def __init__(self, size: int, low: float = 1.0, high: float = 16.0):
        super().__init__(size, low, high)


class ChannelDecay(KeepsFp32, Fusable):
    """log_decay = −exp(A_log) · softplus(f + dt_bias) per channel, in at least fp32 (KDA, arXiv 2510.26692).

    A = exp(A_log) has one number per head, which starts uniform in [low, high]. softplus(dt_bias) starts log-uniform in
    [1e-3, 0.1].

    Args:
        heads: Number of recurrences.
        size: Channels of each.
        low: Smallest initial A.
        high: Largest initial A.
    """

    no_weight_decay = keep_fp32 = ("A_log", "dt_bias")
    lower_bound: float | None = None  # of the log decays, if they are bounded

    def __init__(self, heads: int, size: int, low: float = 1.0, high: float = 16.0):
        super().__init__()
        check_sizes({"heads": heads, "size": size})
        _check_range(low, high)
        self.heads, self.size, self.low, self.high = heads, size, low, high
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads * size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log.is_meta:
            return
        _start_rates(self.A_log, self.low, self.high)
        start_steps(self.dt_bias)

    @property
    def biases(self) -> Tensor:
        """dt_bias of each head [heads,size]."""
        return self.dt_bias.view(self.heads, self.size)

    def forward(self, f: Tensor) -> Tensor:
        """f [B,T,heads·size] → log_decay [B,T,heads,size]."""
        return channel_decay(f.unflatten(-1, (self.heads, self.size)), self.A_log, self.biases, self.lower_bound)


class BoundedChannelDecay(ChannelDecay):
    """log_decay = lower_bound · σ(exp(A_log) · (f + dt_bias)) per channel, in at least fp32 (arXiv 2510.26692).

    A_log starts at 0, and softplus(dt_bias) log-uniform in [1e-3, 0.1]. A step multiplies a channel by
    exp(lower_bound) or more.

    Args:
        heads: Number of recurrences.
        size: Channels of each.
        lower_bound: Smallest log decay, below 0.
    """

    def __init__(self, heads: int, size: int, lower_bound: float = -5.0):
        real = isinstance(lower_bound, Real) and not isinstance(lower_bound, bool)
        if not real or not math.isfinite(lower_bound) or lower_bound >= 0:
            raise kernels.UserError(f"lower_bound: {lower_bound!r} must be a finite number below 0")
        self.lower_bound = lower_bound
        super().__init__(heads, size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log.is_meta:
            return
        self.A_log.zero_()
        start_steps(self.dt_bias)


class LowRankDecay(nn.Linear):
    """log_decay = log σ(W x + b) / normalizer of a few numbers x (GLA, arXiv 2312.06635), as `low_rank_forget_gate`."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)

    def forward(self, x: Tensor, normalizer: float = 1.0) -> Tensor:
        """x [B,T,rank] → log_decay [B,T,size]."""
        return kernels.low_rank_forget_gate(x, self.weight, self.bias, scale=1 / normalizer)


class Strength(KeepsFp32, Fusable):
    """β = σ(b + bias): how much of the old value the delta rule replaces.

    The optional bias is initially 0. With `allow_neg_eigval`, β may reach 2, so that a transition can also reflect
    (arXiv 2411.12537).
    """

    keep_fp32 = ("bias",)

    def __init__(self, size: int, *, bias: bool = False, allow_neg_eigval: bool = False):
        super().__init__()
        self.bias, self.most = nn.Parameter(torch.empty(size)) if bias else None, 2.0 if allow_neg_eigval else 1.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, b: Tensor) -> Tensor:
        """b [...,size] → β, the same shape, at least fp32."""
        return strength(b, self.bias, self.most)


class Trapezoid(KeepsFp32, Fusable):
    """The trapezoidal rule with data-dependent step dt, rate A and weight λ, in at least fp32.

    dt = softplus(a + dt_bias) starts log-uniform in [1e-3, 0.1]. A = 1 + r for r ≥ 0 and 1 / (1 − r) below, at least
    1e-4. λ = σ(w) is the share of a step that the current token gets; the previous one gets the rest.

    Args:
        size: Number of recurrences.
    """

    no_weight_decay = keep_fp32 = ("dt_bias",)

    def __init__(self, size: int):
        super().__init__()
        self.dt_bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.dt_bias.is_meta:
            start_steps(self.dt_bias)

    def forward(self, a: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log_decay −A·dt, dt and λ of raw a, r and w [B,T,size], each in that shape."""
        return trapezoid(a, r, w, self.dt_bias)


class ConstantDecay(nn.Module):
    """A log decay for each recurrence that is fixed, not a parameter.

    It stays in at least fp32 whatever the module's dtype: in bf16 a decay of 1 − 2⁻⁹ would round to 1.

    Args:
        log_decay: The log decays, ≤ 0.
    """

    def __init__(self, log_decay: Sequence[float]):
        super().__init__()
        if not all(x <= 0 for x in log_decay):
            raise kernels.UserError(f"log_decay: {list(log_decay)} must be numbers that are not above 0")
        self.log_decay: Sequence[float] = tuple(log_decay)
        self._on: dict[tuple[torch.device, torch.dtype], tuple[Sequence[float], Tensor]] = {}

    def forward(self, like: Tensor) -> Tensor:
        """The log decays on the device of `like`, where they are copied once, and again if `log_decay` changes."""
        key, values = (like.device, torch.promote_types(like.dtype, torch.float32)), tuple(self.log_decay)
        if key not in self._on or self._on[key][0] != values:
            with torch.inference_mode(False):  # the copy may serve the next training step
                self._on[key] = values, torch.tensor(values, device=key[0], dtype=key[1])
        return self._on[key][1]


def alibi_slopes(count: int) -> list[float]:
    """The slopes of ALiBi (arXiv 2108.12409): 2^(−8i/count), interpolated if count is not a power of two."""
    lower = 2 ** int(math.log2(count))
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    return slopes if lower == count else slopes + alibi_slopes(2 * lower)[::2][: count - lower]


def _check_range(low: float, high: float) -> None:
    check_numbers({"low": low}, positive=False)
    check_numbers({"high": high})
    if low > high:
        raise kernels.UserError(f"low: {low} must not be above high, {high}")


def _start_rates(A_log: Tensor, low: float, high: float) -> None:
    """The logs of uniform numbers; a head could never leave log(0)."""
    A_log.uniform_(low, high).clamp_(min=1e-4).log_()
