"""The channel mix of RWKV-7."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixers import ContextParallel, History
from mixers.arguments import check_sizes, size_or
from mixers.base import checked_input
from mixers.precision import KeepsFp32
from mixers.projection import OrthogonalLinear, ZeroOutputProjection
from mixers.shift import mixed_with_previous
from zoo.lm.mlp import ChannelMixer, squared_relu


class LastToken(NamedTuple):
    """The state of RWKV7ChannelMix."""

    token: History  # last input [N,1,hidden]


class RWKV7ChannelMix(ChannelMixer, KeepsFp32):
    """W_down relu(W_up (x_t + μ ⊙ (x_{t−1} − x_t)))² without biases (RWKV-7, arXiv 2503.14456).

    μ starts as 1 − (channel / hidden_size)^(ρ⁴), where ρ = 1 − layer / num_layers. W_up starts orthogonal with a gain
    of 1, and W_down at zero, as in the authors' code.

    Args:
        hidden_size: Size of x.
        intermediate_size: Inner size; null for 4 · hidden_size.
    """

    stateful = True
    keep_fp32 = ("mix",)

    def __init__(self, hidden_size: int, intermediate_size: int | None = None):
        super().__init__()
        check_sizes({"hidden_size": hidden_size})
        size = size_or("intermediate_size", intermediate_size, 4 * hidden_size)
        self.mix = nn.Parameter(torch.empty(hidden_size))
        self.up_proj = OrthogonalLinear(hidden_size, size)
        self.down_proj = ZeroOutputProjection(size, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.mix.is_meta:
            return
        site = getattr(self, "site", None)
        height = 1.0 if site is None else 1 - site.layer / site.num_layers
        channel = torch.arange(len(self.mix), device=self.mix.device, dtype=torch.float32)
        self.mix.copy_(1 - (channel / len(self.mix)) ** height**4)

    def forward(
        self,
        x: Tensor,
        state: LastToken | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, LastToken | None]:
        x = checked_input(x, len(self.mix))
        before = None if state is None else state.token[:, 0]
        (mixture,), last = mixed_with_previous(x, self.mix[None], before, cu_seqlens, context_parallel)
        return self.down_proj(squared_relu(self.up_proj(mixture))), None if last is None else LastToken(last[:, None])

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LastToken:
        like = self.up_proj.weight
        shape = (batch_size, 1, len(self.mix))
        return LastToken(torch.zeros(shape, device=device or like.device, dtype=dtype or like.dtype))
