"""The arguments of the selective scan, checked once."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.documents import Documents, documents
from ..core.recurrence import at_least_fp32, check_decay, check_not_negative
from ..core.resets import LEAST_ALONE
from ..core.tensors import check_tensors


class Scan(NamedTuple):
    """Checked arguments: D channels with N states each."""

    x: Tensor  # [B,T,D]
    log_decay: Tensor  # [B,T,D]
    rate: Tensor  # [D,N]
    b: Tensor | None  # [B,T,N]
    c: Tensor | None  # [B,T,N] | [D,N]
    initial_state: Tensor | None  # [S,D,N], S sequences
    skip: Tensor | None  # [D]
    cu_seqlens: Tensor | None  # [S+1]
    scale_inputs: bool

    @property
    def documents(self) -> Documents | None:
        if self.cu_seqlens is None:
            return None
        return documents(self.cu_seqlens, self.x.shape[1], self.x.shape[0], self.x.device)

    @property
    def decays(self) -> Tensor:
        """log_decay, at least fp32 and finite: −inf times a rate of 0, or in a gradient times 0, is not a number."""
        return at_least_fp32(self.log_decay).clamp(min=LEAST_ALONE)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        sequences = self.x.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        return (sequences, *self.rate.shape)

    def first_state(self) -> Tensor:
        """The initial state, or zeros: [S,D,N], at least fp32."""
        if self.initial_state is not None:
            return at_least_fp32(self.initial_state)
        return self.x.new_zeros(self.state_shape, dtype=torch.promote_types(self.x.dtype, torch.float32))


def check(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    skip: Tensor | None,
    cu_seqlens: Tensor | None,
    scale_inputs: bool,
) -> Scan:
    """Check shapes, dtypes and devices; every message starts with the argument's name.

    Raises:
        ValueError: An argument does not fit the others.
    """
    named = dict(x=x, log_decay=log_decay, rate=rate, b=b, c=c, initial_state=initial_state, skip=skip)
    check_tensors(**named, cu_seqlens=cu_seqlens)
    if x.dim() != 3 or x.shape[1] < 1:
        raise ValueError(f"x: expected [B,T,D] with T ≥ 1, got shape {tuple(x.shape)}")
    B, T, D = x.shape
    if log_decay.shape != x.shape:
        raise ValueError(f"log_decay: expected the shape of x, {tuple(x.shape)}, got {tuple(log_decay.shape)}")
    rate = log_decay.new_ones(D, 1) if rate is None else rate
    if rate.dim() != 2 or rate.shape[0] != D:
        raise ValueError(f"rate: expected [{D},N], got shape {tuple(rate.shape)}")
    N = rate.shape[1]
    if b is not None and b.shape != (B, T, N):
        raise ValueError(f"b: expected [{B},{T},{N}], got shape {tuple(b.shape)}")
    if c is not None and tuple(c.shape) not in ((B, T, N), (D, N)):
        raise ValueError(f"c: expected [{B},{T},{N}] or [{D},{N}], got shape {tuple(c.shape)}")
    if skip is not None and skip.shape != (D,):
        raise ValueError(f"skip: expected [{D}], got shape {tuple(skip.shape)}")
    for name, tensor in named.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name}: expected a floating dtype, got {tensor.dtype}")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: is on {tensor.device}, but x is on {x.device}")
    if cu_seqlens is not None and not torch.compiler.is_compiling():  # values are unknown while tracing
        documents(cu_seqlens, T, B, x.device)
    check_decay(log_decay)
    if T > 1:  # as in `check_decay`
        check_not_negative("rate", rate)
    scan = Scan(x, log_decay, rate, b, c, initial_state, skip, cu_seqlens, scale_inputs)
    if initial_state is not None and tuple(initial_state.shape) != scan.state_shape:
        raise ValueError(f"initial_state: expected {scan.state_shape}, got shape {tuple(initial_state.shape)}")
    return scan
