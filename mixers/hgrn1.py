"""HGRN."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from kernels.activation_gate import activation_gate

from .arguments import check_numbers
from .base import Site, TokenMixer, checked_input, checked_site, dense_flops
from .context_parallel import ContextParallel, run_selective_scan
from .hgrn2 import LowerBounds, adopt_lower_bounds, build_lower_bounds
from .norm import GatedRMSNorm
from .projection import OutputProjection, Projection
from .registry import register


class VectorState(NamedTuple):
    """The state of a mixer without a matrix."""

    h: Tensor  # [N,D,1], at least fp32


@register(recurrence="h_t = f_t ⊙ h_{t−1} + (1 − f_t) ⊙ SiLU(W_i x_t)", paper="HGRN, arXiv 2311.04823")
class HGRN1(TokenMixer):
    """h_t = f_t ⊙ h_{t−1} + (1 − f_t) ⊙ SiLU(W_i x_t) with f as in HGRN2 (arXiv 2311.04823); its state is a vector.

    This is the real-valued variant, to which the HGRN2 paper keeps as well; HGRN's own recurrence is complex.

    Args:
        site: Where the layer sits in the model.
        lower_bounds: Lower bounds of the forget gates, shared by all layers; null for none.
        norm_eps: Added inside the root of the output norm.
    """

    def __init__(
        self,
        site: Site,
        *,
        lower_bounds: Callable[[int, int], LowerBounds] | None = LowerBounds,
        norm_eps: float = 1e-5,
    ):
        site = checked_site(site, type(self))
        super().__init__()
        check_numbers({"norm_eps": norm_eps}, positive=False)
        self.site, width = site, site.hidden_size
        self.in_proj = Projection(width, {"i": width, "f": width, "g": width})
        self.lower_bounds = build_lower_bounds(lower_bounds, site, width)
        self.g_norm, self.o_proj = GatedRMSNorm(width, eps=norm_eps), OutputProjection(width, width)

    def share(self, below: Sequence[TokenMixer]) -> None:
        adopt_lower_bounds(self, below)

    def forward(
        self,
        x: Tensor,
        state: VectorState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, VectorState | None]:
        i, f, g = self.in_proj(checked_input(x, self.in_proj.in_features))
        odds = None if self.lower_bounds is None else self.lower_bounds.odds(self.site.layer)
        log_decay, written = kernels.tied_gates(f, odds=odds, dtype=torch.promote_types(f.dtype, torch.float32))
        added = activation_gate(i, written, activation="silu")
        h, last = run_selective_scan(
            added,
            log_decay,
            initial_state=None if state is None else state.h,
            return_state=state is not None,
            cu_seqlens=cu_seqlens,
            context_parallel=context_parallel,
        )
        y = self.o_proj(self.g_norm(h.to(x.dtype), g))
        return y, None if last is None else VectorState(last)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> VectorState:
        like = self.o_proj.weight
        dtype = torch.promote_types(dtype or like.dtype, torch.float32)
        return VectorState(torch.zeros(batch_size, self.site.hidden_size, 1, device=device or like.device, dtype=dtype))

    def state_size(self, length: int | None = None) -> int:
        return self.site.hidden_size

    def flops(self, length: int) -> int:
        return dense_flops(self, length)
