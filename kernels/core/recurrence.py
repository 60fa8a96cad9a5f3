"""The arguments that both matrix-state recurrences share, checked once, and the shapes that follow from them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import plain
from .deterministic import is_deterministic
from .documents import Documents, documents
from .tensors import check_tensors

FEW_CHANNELS = 512  # of a head's keys in all subheads: so many of its states take little memory


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or unchanged if it is in fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass  # not frozen: that takes five times as long to construct
class Recurrences:
    """Checked arguments of a recurrence over B rows.

    Letters: G key heads, R value heads per key head (H = G·R), E subheads. There are H·E recurrences; recurrence
    h·E + e reads key head (h // R)·E + e and value head h. A token takes n `steps`; nT is written n·T.
    """

    q: Tensor  # [B,T,G·E,K]
    k: Tensor  # [B,nT,G·E,K]
    v: Tensor  # [B,nT,H,V]
    log_decay: Tensor | None  # [H·E] | [B,T,H·E] | [B,T,H·E,K]
    beta: Tensor | None  # [B,nT,H·E], of the delta rule also [B,nT,H·E,K]
    subheads: int
    scale: float
    initial_state: Tensor | None  # [N,H·E,K,V]
    cu_seqlens: Tensor | None  # [N+1]
    consume_state: bool = False  # whether `first_state()` may be overwritten; never if autograd may need it
    keep_states: bool = False  # whether kernels keep the states before all chunks, if there is to be a backward pass
    erase: Tensor | None = None  # [B,nT,H·E,K]; k by default
    erase_write: Tensor | None = None  # [B,nT,H·E,K]; k by default
    read_before: bool = False  # whether the erase key reads the state before it decays
    steps: int = 1
    final: bool = True  # whether the final states are needed

    @property
    def differentiated(self) -> bool:
        tensors = (self.q, self.k, self.v, self.log_decay, self.beta, self.initial_state, self.erase, self.erase_write)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def documents(self) -> Documents | None:
        if self.cu_seqlens is None:
            return None
        return documents(self.cu_seqlens, self.length, self.v.shape[0], self.q.device)

    @property
    def length(self) -> int:
        """Tokens T of a row."""
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.q.shape[2] // self.subheads

    @property
    def repeats(self) -> int:
        return self.v.shape[2] // self.groups

    @property
    def sequences(self) -> int:
        return self.v.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.sequences, self.v.shape[2] * self.subheads, self.q.shape[3], self.v.shape[3])

    def first_state(self) -> Tensor:
        """The initial state, or zeros: [N,H·E,K,V], at least fp32."""
        if self.initial_state is not None:
            return at_least_fp32(self.initial_state)
        return self.v.new_zeros(self.state_shape, dtype=torch.promote_types(self.v.dtype, torch.float32))

    def own_state(self) -> Tensor:
        """A contiguous initial state to overwrite: the given one if `consume_state` allows it, else a copy."""
        first = self.first_state().contiguous()
        return first.clone() if first is self.initial_state and not self.consume_state else first


class Erasing(NamedTuple):
    """Arguments that only the delta rule has; `Recurrences` explains them."""

    erase: Tensor | None
    read_before: bool
    steps: int


def one_token(a: Recurrences) -> bool:
    """Return whether every sequence is computed as a single step, as in decoding; in deterministic mode never."""
    return a.length == 1 and a.cu_seqlens is None and not is_deterministic()


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    subheads: int,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    consume_state: bool = False,
    keep_states: bool | None = None,
    erasing: Erasing | None = None,
) -> Recurrences:
    """Check shapes, dtypes and devices; every message starts with the argument's name.

    Args:
        q: As in `Recurrences`, like all others but the last.
        erasing: Further arguments of the delta rule, where beta may be per channel; None for other recurrences.

    Raises:
        ValueError: An argument does not fit the others.
    """
    erase, read_before, steps = erasing or Erasing(None, read_before=False, steps=1)
    check_tensors(q=q, k=k, v=v, log_decay=log_decay, beta=beta, erase=erase)
    check_tensors(initial_state=initial_state, cu_seqlens=cu_seqlens)
    if q.dim() != 4:
        raise ValueError(f"q: expected [B,T,heads,K], got shape {tuple(q.shape)}")
    B, T, key_heads, K = shape = q.shape
    if steps < 1:
        raise ValueError(f"steps: must be at least 1, got {steps}")
    rows = T * steps
    if v.dim() != 4 or v.shape[:2] != (B, rows):
        raise ValueError(f"v: expected [{B},{rows},H,V] {_as_q(steps)}, got shape {tuple(v.shape)}")
    if T < 1:
        raise ValueError("q: a sequence needs at least one token")
    if key_heads < 1 or K < 1:
        raise ValueError(f"q: needs at least one head and one channel, got shape {tuple(shape)}")
    H = v.shape[2]
    if k.shape != (B, rows, key_heads, K):
        expected = f"the shape of q, {tuple(shape)}" if steps == 1 else f"[{B},{rows},{key_heads},{K}] {_as_q(steps)}"
        raise ValueError(f"k: expected {expected}, got {tuple(k.shape)}")
    if subheads < 1 or key_heads % subheads:
        raise ValueError(f"subheads: {subheads} does not divide the {key_heads} heads of q")
    if H % (key_heads // subheads):
        raise ValueError(f"v: {H} value heads are no multiple of the {key_heads // subheads} key heads")
    count = H * subheads
    if log_decay is not None:
        allowed = [(count,), (B, T, count), (B, T, count, K)]
        if tuple(log_decay.shape) not in allowed:
            raise ValueError(
                f"log_decay: expected one of {', '.join(map(str, allowed))}, got shape {tuple(log_decay.shape)}"
            )
        check_decay(log_decay)
    # compared one by one: code compiled for sizes that vary finds no shape in a list
    as_channels = beta is not None and erasing is not None and beta.shape == (B, rows, count, K)
    if beta is not None and beta.shape != (B, rows, count) and not as_channels:
        wide = f" or [{B},{rows},{count},{K}]" if erasing is not None else ""
        raise ValueError(f"beta: expected [{B},{rows},{count}]{wide}, got shape {tuple(beta.shape)}")
    if erase is not None and erase.shape != (B, rows, count, K):
        raise ValueError(f"erase: expected [{B},{rows},{count},{K}], got shape {tuple(erase.shape)}")
    if scale is None:
        scale = K**-0.5
    else:
        check_scale(scale)
    result = Recurrences(q, k, v, log_decay, beta, subheads, scale, initial_state, cu_seqlens)
    result.erase, result.read_before, result.steps = erase, read_before, steps
    result.consume_state = consume_state and not result.differentiated and writable(initial_state)
    result.keep_states = subheads * K <= FEW_CHANNELS if keep_states is None else keep_states
    if cu_seqlens is not None and not torch.compiler.is_compiling():  # values are unknown while tracing
        documents(cu_seqlens, T, B, q.device)
    if initial_state is not None and tuple(initial_state.shape) != result.state_shape:
        raise ValueError(f"initial_state: expected {result.state_shape}, got shape {tuple(initial_state.shape)}")
    device, dtype = q.device, q.dtype
    streams = ("q", q), ("k", k), ("v", v)
    gates = ("log_decay", log_decay), ("beta", beta), ("initial_state", initial_state), ("erase", erase)
    for name, x in (*streams, *gates):
        if x is None:
            continue
        if not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating dtype, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: is on {x.device}, but q is on {device}")
    for name, x in streams:
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: the last axis must be contiguous, its stride is {x.stride(-1)}")
        if x.dtype != dtype:
            raise ValueError(f"{name}: is {x.dtype}, but q is {dtype}")
    precision = torch.promote_types(dtype, torch.float32)
    result.beta, result.initial_state = _in_precision(beta, precision), _in_precision(initial_state, precision)
    return result


def _in_precision(x: Tensor | None, precision: torch.dtype) -> Tensor | None:
    """x in the precision of the computation if only one of both is fp64."""
    return x if x is None or torch.float64 not in (x.dtype, precision) else x.to(precision)


def check_scale(scale: float) -> None:
    """Raise a ValueError unless a factor on scores or outputs is finite."""
    if not math.isfinite(scale):
        raise ValueError(f"scale: must be a finite number, got {scale}")


def _as_q(steps: int) -> str:
    """Say how a number of rows follows from that of q."""
    return "as q has it" if steps == 1 else f"as q has it with steps={steps}"


def writable(state: Tensor | None) -> bool:
    """Return whether a state may be overwritten where it is; None may."""
    if state is None:
        return True
    # inference tensors are read-only outside inference mode; compiled code cannot query the mode
    inside = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not state.is_inference()
    return inside and state.is_contiguous()


def check_decay(log_decay: Tensor) -> None:
    """Refuse a log decay above 0 on the CPU; on a device, the call would have to wait for its values.

    A single token is not checked either, since that would take long compared with a step of decoding.

    Raises:
        ValueError: A log decay is positive, or a constant one is not a number.
    """
    single = log_decay.dim() > 1 and log_decay.shape[1] == 1
    if single or not _readable(log_decay):
        return
    largest = float(log_decay.detach().amax())
    # NaN in decays per step is left to training, which looks for it in the loss
    if largest > 0 or (log_decay.dim() == 1 and math.isnan(largest)):
        raise ValueError(f"log_decay: must be ≤ 0, got {largest:g}")


def check_not_negative(name: str, x: Tensor) -> None:
    """Raise a ValueError if an argument has negative entries, only on the CPU, as in `check_decay`."""
    if _readable(x) and (smallest := float(x.detach().amin())) < 0:
        raise ValueError(f"{name}: must be ≥ 0, got {smallest:g}")


def _readable(x: Tensor) -> bool:
    """Return whether there are values that can be read without waiting for a device."""
    return x.is_cpu and x.numel() > 0 and plain((x,))
