"""Preconditioned keys of the delta rule."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import kernels

from .arguments import check_finite, check_sizes
from .context_parallel import ContextParallel, run_recurrence
from .decay import Discretisation, Strength
from .precision import KeepsFp32

GATES = ("curvature_a", "curvature_b")  # raw gates of a mixer's projection: of the decay, and of what a key adds


def curvature_gates(projections: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The raw gates among a mixer's projections by name, each [B,T,heads]; None without a preconditioner."""
    a, b = map(projections.get, GATES)
    return None if a is None or b is None else (a, b)


class Preconditioner(KeepsFp32):
    """Curvature A_t = exp(g_t) A_{t−1} + β_t k_t² of each key channel, with gates g and β per key head.

    A mixer with a preconditioner writes with k ⊙ M in place of k: M = exp(−log(limit) · r / (1 + |r|)) with
    r = log(A + 1e-6) − centre is smaller where A is larger (Preconditioned DeltaNet, arXiv 2604.21100).

    Args:
        heads: Key heads.
        limit: M lies between 1/limit and limit. Above 1 and at most 2: with unit keys and a strength of at most 1, the
            eigenvalues of a step of the delta rule then lie between −1 and 1.
        centre: Initial log(A) of channels whose M is 1. One learned number per head.
    """

    no_weight_decay = keep_fp32 = ("centre",)

    def __init__(self, heads: int, limit: float = 1.5, centre: float = -0.2):
        super().__init__()
        check_sizes({"heads": heads})
        check_finite({"limit": limit, "centre": centre})
        if not 1 < limit <= 2:
            raise kernels.UserError(f"limit: {limit} must be above 1 and at most 2")
        self.limit, self.first_centre = limit, centre
        self.decay, self.strength = Discretisation(heads), Strength(heads)
        self.centre = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @property
    def widths(self) -> dict[str, int]:
        """Widths of the raw gates in a mixer's projection, by name."""
        return dict.fromkeys(GATES, len(self.centre))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.centre, self.first_centre)

    def forward(
        self,
        k: Tensor,
        gates: tuple[Tensor, Tensor],
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
    ) -> tuple[Tensor, Tensor | None]:
        """k [B,T,heads,K] → A in its shape, and the next A [N,heads,1,K] if `state`, the one before, is given."""
        a, b = gates
        # fp16 lacks the range for the gradient of a small curvature
        squares = (k.float() if k.dtype == torch.float16 else k).square()
        one = squares.new_ones(1).expand(*k.shape[:3], 1)
        return run_recurrence(
            kernels.linear_recurrence,
            one,
            one,
            squares,
            gates=dict(log_decay=self.decay(a)[0], beta=self.strength(b), subheads=1, scale=1.0),
            initial_state=state,
            return_state=state is not None,
            cu_seqlens=cu_seqlens,
            context_parallel=context_parallel,
            consume_state=True,
        )

    def flops(self, length: int, size: int) -> int:
        """FLOPs of the curvature of `length` keys of this size."""
        heads = len(self.centre)
        sizes = dict(heads=heads, key_heads=heads, subheads=1, key_size=1, value_size=size)
        return kernels.recurrence_flops(kernels.linear_recurrence, length, **sizes)  # type: ignore[arg-type]
