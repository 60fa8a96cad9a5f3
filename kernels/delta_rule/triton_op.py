"""The (gated) delta rule in Triton, forward and backward: what is launched, in which order, on which tensors.

Forward: `prepare` for all chunks at once, then `scan_forward` along time. Backward: `scan_backward` along time, then
the gradients of all chunks at once. Each of the H·E recurrences is computed by itself: subheads read the values of
their head, and value heads the keys of their group, in place. What several recurrences contribute to is summed
afterwards, in a fixed order: equal inputs give equal bits.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch_file, op
from ..arguments import Recurrences
from ..enqueue import Prepared, cdiv, enqueue, next_power_of_2
from . import triton_launch, triton_step
from .triton_gradients import gradient_of_keys, gradient_of_log_decay, gradient_of_queries
from .triton_launch import Launch, launches
from .triton_prepare import prepare
from .triton_scan import combine, scan_backward, scan_forward
from .triton_tiles import CHUNK

SHORT = 16  # keys of so few channels are computed in fp32
THIRD = 168  # registers of a thread with which three programs of four warps share a multiprocessor
Shapes = list[tuple[tuple[int, ...], torch.dtype]]
INTERPRETED = triton.knobs.runtime.interpret


class Call:
    """The sizes of one call, and its launches: M = H·E recurrences over N sequences, which lie in `slots` chunks.

    Args:
        q: Shape of the queries [B,T,G·E,K].
        v: Shape of the values [B,T,H,V].
        subheads: E.
        scale: Factor of the output.
        dtype: Of q, k and v.
        device: Where.
        cu_seqlens: Boundaries of packed documents.
    """

    def __init__(
        self,
        q: Sequence[int],
        v: Sequence[int],
        subheads: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        cu_seqlens: Tensor | None = None,
    ):
        (self.B, self.T, heads, self.K), (self.H, self.V), self.E = q, v[2:], subheads
        self.G = heads // subheads
        self.R, self.M = self.H // self.G, self.H * subheads
        self.dtype, self.device, self.scale, self.cu_seqlens = dtype, device, scale, cu_seqlens
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.chunks = -(-self.T // CHUNK)  # of a sequence
        self.slots = self.B * self.chunks if cu_seqlens is None else self.T // CHUNK + self.N
        self.prepared: dict[tuple[Any, ...], Prepared] = {}  # launches of this call that came before

    def shapes(self, keep: bool) -> Shapes:
        """Of the outputs of `compute`: o, the final states, and what the backward pass needs."""
        results: Shapes = [
            ((self.B, self.T, self.H, self.V), self.dtype),
            ((self.N, self.M, self.K, self.V), torch.float32),
        ]
        return results + (self.kept if keep else [((0,), dtype) for _, dtype in self.kept])

    @cached_property
    def kept(self) -> Shapes:
        """Of inverse, scores and gates of all chunks, and of what `run_forward` keeps."""
        B, T, V, M, K, slots = self.B, self.T, self.V, self.M, self.K, self.slots
        pairs = ((slots, M, CHUNK, CHUNK), self.dtype)
        of_chunks: Shapes = [pairs, pairs, ((slots, M, 4, CHUNK), torch.float32)]
        cut = self.N * self.segments if self.segments > 1 else 0
        along: Shapes = [((B, T, M, V), self.dtype), ((slots, M, K, V), self.dtype), ((cut, M, K, K), torch.float32)]
        return of_chunks + along

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def states(self, columns: int | None = None) -> Tensor:
        """A state for each segment of each sequence."""
        return self.new(self.N * self.segments, self.M, self.K, columns or self.V, dtype=torch.float32)

    @cached_property
    def segments(self) -> int:
        """Into how many segments each sequence is cut; documents are not."""
        if self.cu_seqlens is not None:
            return 1
        wide = launches(self.device, self.K, self.V, self.dtype).forward
        return triton_launch.segments(wide, self.N * self.M, self.V, self.chunks, self.device)

    def scan(self, name: str) -> Launch:
        """The launch of a pass along time."""
        found = launches(self.device, self.K, self.V, self.dtype)
        wide = getattr(found, name)
        if self.segments > 1:
            return wide
        return triton_launch.whole(wide, found.narrow, self.N * self.M, self.V, self.device)

    def registers(self, launch: Launch) -> int | None:
        """So few for a thread that three programs fit, for a few spills; the compiler would take 195 to 242."""
        return THIRD if self.dtype == torch.bfloat16 and launch.warps == 4 else None

    def over_chunks(self, kernel: Any, launch: Launch, parts: int, *given: Any, **constants: Any) -> None:
        """A program for each chunk and recurrence, and each of `parts` blocks of keys."""
        found = self.prepared.get(key := (kernel, *constants.values()))
        if found is None:
            sizes = (self.scale, self.N, self.T)
            programs = self.slots * self.M * parts
            found = self.prepared[key] = self._prepare(kernel, launch, programs, sizes, constants)
        found(*given, self.cu_seqlens)

    def over_time(self, kernel: Any, launch: Launch, *given: Any, **constants: Any) -> None:
        """A program for each segment and recurrence, and each block of values."""
        found = self.prepared.get(key := (kernel, *constants.values()))
        if found is None:
            sizes = (self.scale, self.T, self.segments, -(-self.chunks // self.segments))
            every = {"V": self.V, "BK": key_block(self.K), "STAGES": launch.stages, **constants}
            every["BV"] = BV = min(launch.values, block(every["V"]))
            programs = self.N * self.segments * self.M * cdiv(every["V"], BV)
            found = self.prepared[key] = self._prepare(kernel, launch, programs, sizes, every)
        found(*given, self.cu_seqlens)

    def _prepare(
        self, kernel: Any, launch: Launch, programs: int, sizes: tuple[Any, ...], constants: dict[str, Any]
    ) -> Prepared:
        every = {"M": self.M, "E": self.E, "R": self.R, "K": self.K, "PACKED": self.cu_seqlens is not None, **constants}
        return ready(kernel, launch, programs, sizes, self.dtype, *every.items())

    def cuts(self, transition: Tensor, local: Tensor, end: Tensor | None, *, reverse: bool) -> Tensor:
        """The states before all segments, or their gradients after them."""
        states, BV = self.states(), 16
        precision = "ieee" if INTERPRETED else "tf32x3"
        given = (transition, local, end, states, self.segments, self.M)
        constants = (self.K, self.V, 64, BV, reverse, end is not None, precision)
        enqueue(combine, (self.N * self.M * cdiv(self.V, BV),), *given, *constants, num_warps=4)
        return states


def call_of(q: Tensor, v: Tensor, subheads: int, scale: float, cu_seqlens: Tensor | None) -> Call:
    """The sizes of these tensors; made once for rows that are alike."""
    sizes = (q.shape, v.shape, subheads, scale, q.dtype, q.device)
    return of_rows(launch_file.current(), *sizes) if cu_seqlens is None else Call(*sizes, cu_seqlens)


@lru_cache(maxsize=256)
def of_rows(file: str | None, *sizes: Any) -> Call:
    """The sizes of rows, while launches come from this file."""
    del file
    return Call(*sizes)


@lru_cache(maxsize=4096)
def ready(
    kernel: Any,
    launch: Launch,
    programs: int,
    sizes: tuple[Any, ...],
    dtype: torch.dtype,
    *constants: tuple[str, Any],
) -> Prepared:
    """A launch of which the tensors are missing."""
    exact = dtype == torch.float32
    # in the interpreter any arithmetic on bf16 is wrong: what is loaded becomes fp32 at once
    kind = tl.float32 if exact or INTERPRETED else tl.bfloat16
    precision = "tf32x3" if exact and not INTERPRETED else "ieee"
    every = {**dict(constants), "DTYPE": kind, "PRECISION": precision}
    return Prepared(kernel, (programs,), *sizes, **every, num_warps=launch.warps, num_stages=launch.stages)


def block(size: int) -> int:
    """The block that holds a whole axis: matrix products need a power of two from 16."""
    return max(16, next_power_of_2(size))


def key_block(size: int) -> int:
    """The same for keys. Blocks of 16 and 32 beside 64 values give wrong gradients on Hopper with triton 3.6."""
    return max(64, block(size))


def prepared(call: Call, q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse, scores and gates of every chunk."""
    inverse, scores, gates = (call.new(*shape, dtype=dtype) for shape, dtype in call.kept[:3])
    launch = launches(call.device, call.K, call.V, call.dtype).prepare
    call.over_chunks(
        prepare,
        launch,
        1,
        q,
        k,
        None if log_decay is None else log_decay.contiguous(),
        beta,
        inverse,
        scores,
        gates,
        BK=min(launch.keys, key_block(call.K)),
        GATE="none" if log_decay is None else "constant" if log_decay.dim() == 1 else "per step",
        MERGE="ieee" if INTERPRETED else "tf32x3" if call.dtype == torch.float32 else "tf32",
        maxnreg=call.registers(launch),
    )
    return inverse, scores, gates


def run_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, chunks: tuple[Tensor, ...], initial: Tensor | None, *, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o of every recurrence [B,T,H·E,V], the final states, and (if `save`) what the gradients need of it.

    That is U, the states before all chunks, and what becomes of a state from one end of a segment to the other.
    """
    launch = call.scan("forward")
    initial = None if initial is None else initial.contiguous()
    transition = call.new(0, call.M, call.K, call.K, dtype=torch.float32)
    if call.segments > 1:
        local, transition = call.states(), call.states(call.K)
        flags: dict[str, Any] = {"OUTPUT": False, "SAVE": False}
        given = (q, k, v, *chunks, None, None, None, None)
        call.over_time(scan_forward, launch, *given, local, START="zero", **flags)
        call.over_time(scan_forward, launch, *given, transition, START="one", V=call.K, **flags)
        initial = call.cuts(transition, local, initial, reverse=False)
    o, final = call.new(call.B, call.T, call.M, call.V), call.states()
    kept = [call.new(*shape, dtype=dtype) for shape, dtype in call.kept[3:5]] if save else []
    u, states = kept or (None, None)
    given = (q, k, v, *chunks, initial, o, u, states, final)
    start = "zero" if initial is None else "given"
    call.over_time(scan_forward, launch, *given, START=start, OUTPUT=True, SAVE=save)
    if call.segments > 1:
        final = final.unflatten(0, (call.N, call.segments))[:, -1].contiguous()
    return o, final, [*kept, transition]


def run_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    chunks: tuple[Tensor, ...],
    transition: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v for every recurrence [B,T,H·E,V], of the states after all chunks, and of the initial states."""
    launch = call.scan("backward")
    if call.segments > 1:
        local = call.states()
        given = (q, k, do, *chunks, None, None, None, local)
        call.over_time(scan_backward, launch, *given, FINAL=False, OUTPUT=False)
        dfinal = call.cuts(transition, local, dfinal, reverse=True)
    dv, dinitial = call.new(call.B, call.T, call.M, call.V), call.states()
    dstates = call.new(call.slots, call.M, call.K, call.V)
    given = (q, k, do, *chunks, dfinal, dv, dstates, dinitial)
    call.over_time(scan_backward, launch, *given, FINAL=dfinal is not None, OUTPUT=True)
    if call.segments > 1:
        dinitial = dinitial.unflatten(0, (call.N, call.segments))[:, 0]
    return dv, dstates, dinitial


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    subheads: int,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final states, and (if `keep`) what `differentiate` would otherwise have to compute again."""
    call = call_of(q, v, subheads, scale, cu_seqlens)
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    chunks = prepared(call, q, k, beta, log_decay)
    o, final, along = run_forward(call, q, k, v, chunks, initial_state, save=keep)
    kept = (*chunks, *along) if keep else [call.new(*shape, dtype=dtype) for shape, dtype in call.shapes(False)[2:]]
    if subheads > 1:
        o = o.unflatten(2, (call.H, subheads)).sum(3, dtype=o.dtype)
    return (o, final, *kept)


def differentiate(
    gradients: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    subheads: int,
    scale: float,
    keep: bool,
) -> list[Tensor | None]:
    """The gradients of all tensors; there is none for `cu_seqlens`."""
    call = call_of(q, v, subheads, scale, cu_seqlens)
    q, k, beta = q.contiguous(), k.contiguous(), beta.contiguous()
    if not keep:
        again = prepared(call, q, k, beta, log_decay)
        kept = (*again, *run_forward(call, q, k, v.contiguous(), again, initial_state, save=True)[2])
    inverse, scores, gates, u, states, transition = kept
    do, dfinal = (None if x is None else x.contiguous() for x in gradients)
    do = call.new(*v.shape).zero_() if do is None else do
    dv, dstates, dinitial = run_backward(call, q, k, do, (inverse, scores, gates), transition, dfinal)

    B, T, M, K, V, gated = call.B, call.T, call.M, call.K, call.V, log_decay is not None
    table = launches(call.device, K, V, call.dtype)
    shared: dict[str, Any] = {"V": V, "GATED": gated}
    (keys, values), parts = _blocks(table.dq, K, V)
    (keys_k, values_k), parts_k = _blocks(table.dk, K, V)
    from_queries = from_keys = before_t = across = None
    if gated:
        from_queries, from_keys, before_t = (
            call.new(call.slots, M, n, CHUNK, dtype=torch.float32) for n in (parts, parts_k, parts_k)
        )
        across = call.new(call.slots, M, parts_k, dtype=torch.float32)
    reads, writes = call.new(*inverse.shape), call.new(*inverse.shape)
    diagonal = call.new(call.slots, M, CHUNK, dtype=torch.float32)
    dq, dk, dbeta = call.new(B, T, M, K), call.new(B, T, M, K), call.new(B, T, M, dtype=torch.float32)
    given: tuple[Any, ...] = (q, k, u, do, dv, beta, gates, states, dq, dbeta, reads, writes, diagonal, from_queries)
    call.over_chunks(gradient_of_queries, table.dq, parts, *given, BK=keys, BV=values, STAGES=table.dq.stages, **shared)
    given = (q, k, u, dv, gates, states, dstates, reads, writes, diagonal, dk, from_keys, before_t, across)
    call.over_chunks(
        gradient_of_keys,
        table.dk,
        parts_k,
        *given,
        BK=keys_k,
        BV=values_k,
        STAGES=table.dk.stages,
        maxnreg=call.registers(table.dk),
        **shared,
    )

    dlog_decay = None
    if log_decay is not None:
        dlog_decay = call.new(B, T, M, dtype=torch.float32)
        given = (from_queries, from_keys, before_t, across, dlog_decay, cu_seqlens, call.N, T, M)
        enqueue(gradient_of_log_decay, (call.slots * M,), *given, parts, parts_k, cu_seqlens is not None, num_warps=1)
        if log_decay.dim() == 1:
            dlog_decay = dlog_decay.sum((0, 1))
        dlog_decay = dlog_decay.to(log_decay.dtype)
    if call.R > 1:
        shape = (call.G, call.R, subheads)
        dq, dk = (x.unflatten(2, shape).sum(3, dtype=x.dtype).flatten(2, 3) for x in (dq, dk))
    if subheads > 1:
        dv = dv.unflatten(2, (call.H, subheads)).sum(3, dtype=dv.dtype)
    first = None if initial_state is None else dinitial.to(initial_state.dtype).contiguous()
    return [dq, dk, dv, dbeta.to(beta.dtype), dlog_decay, first, None]


def _blocks(launch: Launch, K: int, V: int) -> tuple[tuple[int, int], int]:
    """Blocks of keys and of values, and how many of keys there are."""
    keys, values = min(launch.keys, key_block(K)), min(launch.values, block(V))
    return (keys, values), cdiv(K, keys)


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    subheads: int,
    scale: float,
    keep: bool,
) -> tuple[Tensor, ...]:
    """The shapes of `compute`."""
    call = Call(q.shape, v.shape, subheads, scale, q.dtype, q.device, cu_seqlens)
    return tuple(call.new(*shape, dtype=dtype) for shape, dtype in call.shapes(keep))


def unread(*given: Any) -> Sequence[int]:
    """The values: where U is kept, the gradients need nothing else of them."""
    keep, values = given[-1], 2
    return (values,) if keep else ()


delta_rule = op.register("delta_rule", compute, differentiate, fake, results=2, unread=unread)


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    assert a.beta is not None
    given = (a.q, a.k, a.v, a.beta, a.log_decay, a.initial_state)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if a.v.shape[1] == 1 and a.documents is None and not wanted:
        return triton_step.forward(a)
    # With subheads, the states of all chunks are E times as large as at E = 1: there, time is cheaper than memory.
    keep = wanted and a.subheads == 1
    # fp16 has not the range for a state, nor for what a small β multiplies. And two cases would pass the error that
    # bf16 is allowed: a chunk of tokens far more than its keys can tell apart, and the gradient of a constant decay, a
    # sum of what all steps contribute, of either sign.
    learned_constant = wanted and a.log_decay is not None and a.log_decay.dim() == 1 and a.log_decay.requires_grad
    exact = a.q.dtype == torch.float16 or a.q.shape[3] <= SHORT or learned_constant
    q, k, v = (x.float() if exact else x for x in (a.q, a.k, a.v))
    o, final = delta_rule(q, k, v, a.beta, a.log_decay, a.initial_state, a.cu_seqlens, a.subheads, a.scale, keep)
    return o.to(a.v.dtype), final
