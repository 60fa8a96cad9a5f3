"""The stabiliser of exponential input gates: a running maximum of the decayed past and the new log input gates."""

import torch
from torch import Tensor

from kernels.token_shift import starting

from .context_parallel import ContextParallel
from .shift import check_sequences, sequences, shifted


def running_max(f: Tensor, i: Tensor) -> Tensor:
    """m_t = max(f_t + m_{t−1}, i_t) from m = −∞ along the second axis, by an associative scan."""
    span = 1
    while span < i.shape[1]:
        i = torch.cat([i[:, :span], torch.maximum(i[:, span:], f[:, span:] + i[:, :-span])], 1)
        f = torch.cat([f[:, :span], f[:, span:] + f[:, :-span]], 1)
        span *= 2
    return i


@torch.no_grad()
def stabiliser(
    f: Tensor,
    i: Tensor,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    context_parallel: ContextParallel | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """m_t = max(f_t + m_{t−1}, i_t) in fp64, without gradients, as m cancels in the output.

    Args:
        f: Logs of forget gates [B,T,H], ≤ 0.
        i: Logs of input gates [B,T,H].
        before: m before the first tokens [N,H]; None for 0.
        cu_seqlens: Boundaries [N+1] of packed documents, or None.
        context_parallel: Which part of each sequence f and i are.

    Returns:
        m [B,T,H], m of the previous token in the same shape, and the last m [N,H].
    """
    # the differences of sums over thousands of tokens need more digits than fp32 has
    f, i = f.double(), i.double()
    check_sequences(before, i, cu_seqlens)
    zeros = f.new_zeros(sequences(i, cu_seqlens), f.shape[2])

    def continued(before: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        starts, first = starting(i, before, cu_seqlens)
        m = running_max(f.masked_fill(starts, -torch.inf), torch.where(starts, torch.maximum(i, f + first), i))
        previous, last = shifted(m, before, cu_seqlens)
        assert last is not None
        return (m, previous, last), last

    if context_parallel is None:
        return continued(zeros if before is None else before)[0]
    context_parallel.check(before, cu_seqlens)
    return context_parallel.continued(continued, zeros, [])
