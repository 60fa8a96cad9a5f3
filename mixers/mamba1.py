"""Mamba."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import kernels
from kernels.activation_gate import activation_gate

from .arguments import check_sizes, size_or
from .base import Site, TokenMixer, checked_input, checked_site, dense_flops
from .context_parallel import ContextParallel, run_selective_scan
from .features import FeaturePath, Features, together
from .projection import OutputProjection, Projection
from .registry import register
from .state import History


class MambaState(NamedTuple):
    """The state of a Mamba layer."""

    h: Tensor  # [S,D,N], at least fp32
    histories: tuple[History, ...]  # last conv inputs [S,W−1,D]


class StepProjection(nn.Linear):
    """−softplus(W x + bias), minus the steps dt [...,width] of x [...,rank].

    W is initially U(±rank^-½) as published, whatever the model's initialisation.
    """

    def __init__(self, rank: int, width: int):
        super().__init__(rank, width, bias=False)

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return kernels.low_rank_forget_gate(x, self.weight, bias, negated=True)  # −softplus(W x + bias)


@register(
    recurrence="h_t = exp(dt_t A) h_{t−1} + dt_t B_t x_t,  y_t = C_t·h_t + D x_t",
    paper="Mamba, arXiv 2312.00752",
)
class Mamba1(TokenMixer):
    """h_t = exp(dt_t A) h_{t−1} + dt_t B_t x_t, y_t = C_t·h_t + D x_t, diagonal A (arXiv 2312.00752).

    Args:
        site: Where the layer sits in the model.
        expand: Inner width over hidden_size.
        state_dim: States per channel N.
        conv: Taps of the short convolution.
        dt_rank: Rank of the projection that makes dt; hidden_size / 16, rounded up, by default.
        conv_bias: Whether the short convolution has a bias.
    """

    no_weight_decay = ("A_log", "D")
    keep_fp32 = ("A_log", "D", "dt_bias")

    def __init__(
        self,
        site: Site,
        *,
        expand: int = 2,
        state_dim: int = 16,
        conv: int = 4,
        dt_rank: int | None = None,
        conv_bias: bool = True,
    ):
        site = checked_site(site, type(self))
        super().__init__()
        check_sizes({"expand": expand, "state_dim": state_dim})
        self.width, self.state_dim = expand * site.hidden_size, state_dim
        rank = size_or("dt_rank", dt_rank, math.ceil(site.hidden_size / 16))
        self.in_proj = Projection(site.hidden_size, {"x": self.width, "z": self.width})
        self.x_features = FeaturePath(Features(conv, bias=conv_bias, activation="silu"), self.width, 1)
        self.x_proj = Projection(self.width, {"dt": rank, "B": state_dim, "C": state_dim})
        self.dt_proj, self.dt_bias = StepProjection(rank, self.width), nn.Parameter(torch.empty(self.width))
        self.A_log = nn.Parameter(torch.empty(self.width, state_dim))
        self.D = nn.Parameter(torch.empty(self.width))
        self.out_proj = OutputProjection(self.width, site.hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.A_log.is_meta:  # it has no values, and for these formulas PyTorch would import its compiler
            return
        rates = torch.arange(1, self.state_dim + 1, device=self.A_log.device, dtype=torch.float32)
        self.A_log.copy_(rates.log().expand_as(self.A_log))
        nn.init.ones_(self.D)
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
        self.dt_bias.add_(torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(
        self,
        x: Tensor,
        state: MambaState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, MambaState | None]:
        u, z = self.in_proj(checked_input(x, self.in_proj.in_features))
        no_positions = u.new_zeros(0, dtype=torch.int64)
        history = None if state is None else state.histories[0]
        ((features, history),), _, (z,) = together(
            [self.x_features], [u.unsqueeze(-1)], [history], no_positions, cu_seqlens, context_parallel, others=[z]
        )
        u = features.squeeze(-1)
        dt, b, c = self.x_proj(u)
        y, h = run_selective_scan(
            u,
            self.dt_proj(dt, self.dt_bias),
            kernels.at_least_fp32(self.A_log).exp(),
            b,
            c,
            skip=self.D,
            scale_inputs=True,
            initial_state=None if state is None else state.h,
            return_state=state is not None,
            cu_seqlens=cu_seqlens,
            context_parallel=context_parallel,
        )
        y = self.out_proj(activation_gate(z, y, activation="silu"))
        return y, None if h is None or history is None else MambaState(h, (history,))

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MambaState:
        like = self.out_proj.weight
        device, dtype = device or like.device, dtype or like.dtype
        state_dtype = torch.promote_types(dtype, torch.float32)
        h = torch.zeros(batch_size, self.width, self.state_dim, device=device, dtype=state_dtype)
        return MambaState(h, (self.x_features.init_history(batch_size, device, dtype),))

    def state_size(self, length: int | None = None) -> int:
        return self.width * self.state_dim

    def flops(self, length: int) -> int:
        return dense_flops(self, length) + 2 * length * self.state_size()  # the read-out C_t·h_t
