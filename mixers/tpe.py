"""TPE, the position encoding of cosFormer2's embedding."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .arguments import check_sizes
from .base import Site, TokenMixer
from .context_parallel import ContextParallel, run_selective_scan


class TPEState(NamedTuple):
    """The running means of each channel."""

    h: Tensor  # [S,D,e], at least fp32


class TPE(TokenMixer):
    """y_{t,c} = Σ_{s≤t} Σ_e b_{c,e} λ_e^{t−s} x_{s,c}: a bank of e running sums per channel (arXiv 2406.16690, A.1.4).

    It replaces the embedding x by y (`model.position: TPE`). The paper gives its parameter count, d·e, but no formula;
    this reading fits, with rates λ_e that are fixed, shared by the channels, and spread up to 8192 tokens.

    Args:
        site: Where the layer sits in the model.
        size: e; hidden_size / num_heads by default.
    """

    def __init__(self, site: Site, *, size: int | None = None):
        super().__init__()
        check_sizes({"size": size})
        self.size = site.heads()[1] if size is None else size  # the model's heads may not divide hidden_size
        self.weight = nn.Parameter(torch.empty(site.hidden_size, self.size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        self.weight[:, 0] += 1  # the fastest sum is almost the token itself

    def forward(
        self,
        x: Tensor,
        state: TPEState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, TPEState | None]:
        # rates 1/τ_e with τ_e from 1/16 (no memory) to 8192 tokens
        step = torch.linspace(-4, 13, self.size, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        rate = (2**-step).expand(x.shape[2], -1)
        y, h = run_selective_scan(
            x,
            torch.full_like(x, -1.0),
            rate,
            c=self.weight,
            initial_state=None if state is None else state.h,
            return_state=state is not None,
            cu_seqlens=cu_seqlens,
            context_parallel=context_parallel,
        )
        return y, None if h is None else TPEState(h)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TPEState:
        dtype = torch.promote_types(dtype or self.weight.dtype, torch.float32)
        return TPEState(torch.zeros(batch_size, *self.weight.shape, device=device or self.weight.device, dtype=dtype))

    def state_size(self, length: int | None = None) -> int:
        return self.weight.numel()

    def flops(self, length: int) -> int:
        return 0  # no products; 2·d·e multiply-adds a token
