"""The time mix of RWKV-7."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid, tanh

from .arguments import check_numbers, check_sizes, size_or
from .base import LinearMixer, LinearState, Site, Streams, checked_input, checked_site
from .context_parallel import ContextParallel
from .norm import HeadNorm
from .projection import LowRankLinear, OrthogonalLinear, ZeroOutputProjection, mapped, split_heads
from .registry import register
from .shift import mixed_with_previous

FIRST_VALUE = "first_value"  # the stream of values of the lowest layer [B,T,hidden]
LARGEST_DECAY = math.exp(-0.5)  # of a log decay, negated


@register(
    recurrence="S_t = (diag(w_t) − (a_t ⊙ κ_t) κ_tᵀ) S_{t−1} + k_t v_tᵀ,  y_t = norm(S_tᵀ r_t) + (r_t·(ρ ⊙ k_t)) v_t",
    paper="RWKV-7, arXiv 2503.14456",
    tiny={"head_dim": 32},
)
class RWKV7(LinearMixer):
    """S_t = (diag(w_t) − (a_t ⊙ κ_t) κ_tᵀ) S_{t−1} + k_t v_tᵀ, y_t = norm(S_tᵀ r_t) + (r_t·(ρ ⊙ k_t)) v_t.

    The time mix of RWKV-7 (arXiv 2503.14456). Each projection reads another mixture of a token and the previous one.
    κ is the direction of k, the rate a says how much of what the state holds for it is erased, and log w stays above
    −exp(−½). Values are mixed with those of the lowest layer of this kind, which passes them on (`FIRST_VALUE`). It
    starts as the author's training code does; W_o starts at zero.

    Args:
        site: Where the layer sits in the model.
        head_dim: Size of a head, K and V; hidden_size is a multiple of it.
        rate_rank: Rank of the projections of decays and rates; null for 2.5 √hidden_size, rounded to multiples of 32.
        value_rank: Rank of the projection that mixes in the first values; null for 1.7 √hidden_size, rounded likewise.
        gate_rank: Rank of the projection of the output gate; null for 5 √hidden_size, rounded likewise.
        norm_eps: Added inside the root of the norm of each head; null for 1e-5 · head_dim, as published.
    """

    recurrence = staticmethod(kernels.delta_rule)
    decay_per_channel = erase_keys = erase_writes = read_before = True
    scale = 1.0
    passes = (FIRST_VALUE,)
    head_weights = ("r_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    no_weight_decay = keep_fp32 = ("mix", "decay_bias", "rate_bias", "value_bias", "k_k", "k_a", "r_k")

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int = 64,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        norm_eps: float | None = None,
    ):
        site, size = checked_site(site, type(self)), site.hidden_size
        check_sizes({"head_dim": head_dim})
        if size % head_dim:
            raise kernels.UserError(f"head_dim: {head_dim} does not divide hidden_size {size}")
        norm_eps = 1e-5 * head_dim if norm_eps is None else norm_eps
        check_numbers({"norm_eps": norm_eps}, positive=False)
        heads = size // head_dim
        super().__init__(site, num_heads=heads, key_size=head_dim, value_size=head_dim)
        channels = self.gate_heads * self.subhead_size
        rates = size_or("rate_rank", rate_rank, _rank(2.5, size))
        values = size_or("value_rank", value_rank, _rank(1.7, size))
        gates = size_or("gate_rank", gate_rank, _rank(5, size))
        self.mix = nn.Parameter(torch.empty(6, size))  # of r, w, k, v, a, g
        self.r_proj, self.v_proj = OrthogonalLinear(size, size), OrthogonalLinear(size, size)
        self.k_proj = OrthogonalLinear(size, size, 0.1)
        self.decay, self.rate = LowRankLinear(size, rates, channels, tanh), LowRankLinear(size, rates, channels)
        self.g = LowRankLinear(size, gates, size, sigmoid)
        is_first = FIRST_VALUE not in site.passed
        self.value = None if is_first else LowRankLinear(size, values, size)
        self.value_bias = None if is_first else nn.Parameter(torch.empty(size))
        self.decay_bias, self.rate_bias = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))
        self.k_k, self.k_a, self.r_k = (nn.Parameter(torch.empty(channels)) for _ in range(3))
        self.o_norm = HeadNorm(heads, head_dim, norm_eps, ((site.layer + 1) / site.num_layers) ** 0.7)
        self.o_proj = ZeroOutputProjection(size, size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.mix.is_meta:
            return
        size, N, (layer, layers) = self.site.hidden_size, self.key_size, self.site[2:4]
        i = torch.arange(size, device=self.mix.device, dtype=torch.float32)
        depth, up = layer / max(layers - 1, 1), 1 - layer / layers
        line = i / max(size - 1, 1)
        z = (2 * (i % N) - (N - 1)) / max(N - 1, 1)
        for row, power in zip(self.mix, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            row.copy_(1 - (i / size) ** (power * up))
        decay = -5.5 + 6 * line ** (1 + depth**0.3) + 2.5 * z * z.abs()
        rate = -0.19 + 0.3 * z * z.abs() + 0.4 * (line - 0.5)
        starts = {"decay_bias": decay, "rate_bias": rate, "k_k": 0.71 - 0.1 * (line - 0.5)}
        for name, start in starts.items():  # subheads start as their head does
            parameter = self.get_parameter(name)
            parameter.copy_(start.view(-1, 1, N).expand(-1, len(parameter) // size, -1).flatten())
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        if self.value_bias is not None:
            self.value_bias.copy_(0.73 - 0.4 * (line - 0.5))

    def forward(  # type: ignore[override]  # the streams come back where some are given
        self,
        x: Tensor,
        state: LinearState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
        passed: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, LinearState | None] | tuple[Tensor, LinearState | None, dict[str, Tensor]]:
        x = checked_input(x, self.site.hidden_size)
        *histories, token = (None,) if state is None else state.histories
        before = None if token is None else token[:, 0]
        mixtures, last = mixed_with_previous(x, self.mix, before, cu_seqlens, context_parallel)
        s, first = self._project(mixtures, passed)
        state = None if state is None else state._replace(histories=tuple(histories))
        y, state = self.mixed(s, x, state, cu_seqlens, context_parallel)
        if state is not None and last is not None:
            state = state._replace(histories=(*state.histories, last[:, None]))
        return (y, state) if passed is None else (y, state, {FIRST_VALUE: first})

    def _project(self, mixtures: tuple[Tensor, ...], passed: Mapping[str, Tensor] | None) -> tuple[Streams, Tensor]:
        """The streams, and the values of the lowest layer [B,T,hidden]."""
        r, w, k, v, a, g = mixtures
        low_rank = [(self.decay, w), (self.rate, a), (self.g, g), *([] if self.value is None else [(self.value, v)])]
        streams = mapped([(self.r_proj, r), (self.k_proj, k), (self.v_proj, v), *low_rank])
        q, k, values, decay, rate, gate, *share = streams
        first = values
        if self.value_bias is not None:
            first = self._first(passed, values)
            values = kernels.sigmoid_mix(values, first, share[0], self.value_bias)
        q, k, v = (split_heads(y, self.num_heads) for y in (q, k, values))
        return Streams(q, k, v, decay, gate=gate, erase=rate), first

    def _first(self, passed: Mapping[str, Tensor] | None, values: Tensor) -> Tensor:
        """The values of the lowest layer.

        Raises:
            UserError: They are missing, or have another shape.
        """
        if passed is None or FIRST_VALUE not in passed:
            raise kernels.UserError(f"passed: RWKV7 in layer {self.site.layer} needs {FIRST_VALUE!r} of a lower layer")
        if (shape := passed[FIRST_VALUE].shape) != values.shape:
            raise kernels.UserError(
                f"passed: {FIRST_VALUE!r} must have the shape {tuple(values.shape)}, got {tuple(shape)}"
            )
        return passed[FIRST_VALUE].to(values.dtype)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        assert s.erase is not None
        parameters = self.decay_bias, self.rate_bias, self.k_k, self.k_a
        k, erase, write, log_decay = kernels.erase_gates(s.k, s.log_decay, s.erase, *parameters, largest=LARGEST_DECAY)
        return s.replace(k=k, log_decay=log_decay, erase=erase, erase_write=write)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        norm = self.o_norm
        y = kernels.bonus_readout(o, s.q, s.k, s.v, s.gate, self.r_k, norm.weight, norm.bias, norm.eps)
        return self.o_proj(y)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LinearState:
        state = super().init_state(batch_size, device, dtype)
        token = state.histories[0].new_zeros(batch_size, 1, self.site.hidden_size)
        return state._replace(histories=(*state.histories, token))


def _rank(factor: float, size: int) -> int:
    return max(32, 32 * round(factor * size**0.5 / 32))
