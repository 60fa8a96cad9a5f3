"""One call of the linear recurrence in Triton: its sizes, its workspaces, and the launches that it is made of."""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..enqueue import Prepared, enqueue, next_power_of_2
from ..launch import Launch, launch
from .layout import BLOCK, CHUNK, LARGEST, Layout, filling, of_documents, of_rows, segment_length
from .triton_carry import carry, scan
from .triton_channel import channel_grads, channel_score_grads, channel_scores
from .triton_head import head_gate_grads, head_gates, head_scores

SCAN_BLOCK = 1024
FEW = 2  # slices: each makes the scores of a chunk for itself, where nothing else needs them
FP32 = torch.float32


class Tokens:
    """A tensor [B,T,heads,D] as the kernels see it: tokens of all rows one after another, and two strides.

    Args:
        x: The tensor.
        segment: How many tokens 32 bits have to reach over.
    """

    def __init__(self, x: Tensor, segment: int = 1):
        B, T = x.shape[:2]
        row, token, head, channel = x.stride()
        joined = B == 1 or T == 1 or row == T * token
        if not joined or channel != 1 or (T > 1 and token * segment > LARGEST):
            x = x.contiguous()
            row, token, head, _ = x.stride()
        self.data = x
        self.strides = (token if T > 1 else row, head)


class Call:
    """Sizes, workspaces and launches of one call.

    Args:
        q: Queries [B,T,G·E,K].
        k: Keys, as q.
        v: Values [B,T,H,V].
        log_decay: None, [H·E], [B,T,H·E] or [B,T,H·E,K], in fp32, contiguous.
        beta: None or [B,T,H·E], in fp32, contiguous.
        cu_seqlens: Boundaries of packed documents.
        scale: Factor of the output.
        subheads: E.
        grad: In the backward, the gradient of the output.
        gates: In the backward, whether log_decay or beta needs a gradient.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        subheads: int,
        grad: Tensor | None = None,
        gates: bool = False,
    ):
        self.log_decay, self.beta, self.cu_seqlens = log_decay, beta, cu_seqlens
        self.scale, self.subheads = scale, subheads
        self.segment = 1 if cu_seqlens is not None else segment_length(q, v, subheads)
        self.q, self.k, self.v = (Tokens(x, min(self.segment, q.shape[1])) for x in (q, k, v))
        self.grad, self.gates = None if grad is None else Tokens(grad), gates
        self.B, self.T, _, self.K = q.shape
        self.H, self.V = v.shape[2:]
        self.heads = self.H * subheads
        self.groups = self.heads // q.shape[2]  # value heads per key head
        self.gate = "none" if log_decay is None else {1: "constant", 3: "head", 4: "channel"}[log_decay.dim()]
        self.channel = self.gate == "channel"
        self.dtype, self.device = q.dtype, q.device
        self.chunks, self.blocks = self.layout.chunks.shape[0], self.layout.blocks.shape[0]
        self.inside = not self.channel and not gates and self.slices(max(self.K, self.V))[1] <= FEW
        if self.inside:
            self._head_gates()
        elif self.channel:
            self._channel_scores()
        else:
            self._head_scores()

    @cached_property
    def layout(self) -> Layout:
        if self.cu_seqlens is None:
            return of_rows(self.B, self.T, self.segment, self.device)
        widest = max(self.heads * max(self.K, self.V, CHUNK), *(x.strides[0] for x in (self.q, self.k, self.v)))
        segments = filling(self.heads, self.K, self.V, self.dtype, self.device)
        return of_documents(self.cu_seqlens, self.T, segments, LARGEST // widest, self.device)

    def launch(self, kernel: str) -> Launch:
        return launch(kernel, max(self.K, self.V), self.dtype, self.device)

    @cached_property
    def sequential(self) -> Launch:
        return self.launch("carry")

    @property
    def sums(self) -> Mapping[str, Any]:
        """How decays are summed, and the dtype of factors that know a reference point: with the range of fp32."""
        return {"WIDE": self.dtype == FP32, "DOT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def per_token(self, size: int) -> Tensor:
        """An uninitialised [B,T,H·E,size]."""
        return self.empty(self.B, self.T, self.heads, size)

    def states(self) -> Tensor:
        """Uninitialised states [N,H·E,K,V]."""
        return self.empty(self.layout.sequences.shape[0], self.heads, self.K, self.V, dtype=FP32)

    def _or_unused(self, *tensors: Tensor | None) -> list[Tensor]:
        """A pointer that a kernel does not follow has to point somewhere."""
        return [self.scores if x is None else x for x in tensors]

    def _head_gates(self) -> None:
        shape = (self.heads, self.chunks, CHUNK)
        self.enter, self.leave = (self.empty(*shape, dtype=FP32) for _ in range(2))
        self.decays = self.empty(self.heads, self.chunks, 2, CHUNK, dtype=FP32)
        self.total = self.empty(self.heads, self.chunks, dtype=FP32)
        self.scores = self.score_grads = self.enter
        enqueue(
            head_gates,
            (self.chunks, self.heads),
            *self._or_unused(self.log_decay, self.beta),
            self.enter,
            self.leave,
            self.total,
            self.decays,
            self.layout.chunks,
            self.scale,
            self.heads,
            self.chunks,
            GATE=self.gate,
            BETA=self.beta is not None,
            WIDE=self.dtype == FP32,
            num_warps=1,
        )
        self.queries, self.keys = self.q, self.k

    def _head_scores(self) -> None:
        self.scores = self.empty(self.heads, self.chunks, CHUNK, CHUNK)
        self.decays = self.scores
        vectors = self.empty(5 if self.gates else 2, self.heads, self.chunks, CHUNK, dtype=FP32).unbind()
        self.enter, self.leave = vectors[:2]
        self.total = self.empty(self.heads, self.chunks, dtype=FP32)
        self.score_grads = self.scores if self.grad is None else torch.empty_like(self.scores)
        self.rest, self.rows, self.columns = vectors[2:] if self.gates else [self.enter] * 3
        grad = self.grad or self.v
        tensors = [self.q.data, self.k.data, self.v.data, grad.data, *self._or_unused(self.log_decay, self.beta)]
        tensors += [self.scores, self.score_grads, self.enter, self.leave, self.rest, self.total, self.rows]
        enqueue(
            head_scores,
            (self.chunks, self.heads),
            *tensors,
            self.columns,
            self.layout.chunks,
            self.scale,
            *self.q.strides,
            *self.k.strides,
            *self.v.strides,
            *grad.strides,
            self.heads,
            self.chunks,
            self.groups,
            SUBHEADS=self.subheads,
            K=self.K,
            V=self.V,
            BK=padded(self.K),
            BV=padded(self.V),
            GATE=self.gate,
            BETA=self.beta is not None,
            BACKWARD=self.grad is not None,
            GATES=self.gates,
            WIDE=self.dtype == FP32,
            **options(self.dtype, self.launch("head_scores")),
        )
        self.queries, self.keys = self.q, self.k

    def _channel_scores(self) -> None:
        self.scores = self.empty(self.heads, self.chunks, CHUNK, CHUNK)
        self.decays = self.scores
        entering, leaving = self.per_token(self.K), self.per_token(self.K)
        self.total = self.empty(self.heads, self.chunks, self.K, dtype=FP32)
        self.steep = self.empty(self.heads, self.chunks, dtype=torch.int8)
        entry = self.launch("channel_scores")
        for slow in (False, True):
            enqueue(
                channel_scores,
                (self.chunks, self.heads),
                self.q.data,
                self.k.data,
                *self._or_unused(self.log_decay, self.beta),
                self.scores,
                entering,
                leaving,
                self.total,
                self.steep,
                self.layout.chunks,
                self.scale,
                *self.q.strides,
                *self.k.strides,
                self.heads,
                self.chunks,
                self.groups,
                SUBHEADS=self.subheads,
                K=self.K,
                BK=min(entry.block, padded(self.K)),
                BETA=self.beta is not None,
                SLOW=slow,
                **self.sums,
                **options(self.dtype, entry),
            )
        self.queries, self.keys = Tokens(entering), Tokens(leaving)
        self.enter = self.leave = self.score_grads = self.scores

    def slices(self, size: int) -> tuple[int, int]:
        """Width and number of the slices that the output of a pass is cut into."""
        width = min(self.sequential.block, padded(size))
        return width, -(-size // width)

    def starts(self, mode: str, y: Tokens, z: Tokens, first: Tensor | None, last: Tensor | None) -> Tensor | None:
        """The states that segments start from, in forward order (mode o) or in reverse (dv); fills `last`."""
        if not self.layout.segmented:
            return first
        count = self.layout.segments.shape[0]
        local = self.empty(count, self.heads, self.K, self.V, dtype=FP32)
        shrunk = self.empty(count, self.heads, self.K if self.channel else 1, dtype=FP32)
        self.carry(mode, y, y, z, last=local, shrunk=shrunk)
        enqueue(
            scan,
            (-(-self.K * self.V // SCAN_BLOCK), self.heads, self.layout.sequences.shape[0]),
            local,
            shrunk,
            *self._or_unused(first, last),
            self.layout.sequences,
            self.heads,
            K=self.K,
            V=self.V,
            BLOCK=SCAN_BLOCK,
            CHANNEL=self.channel,
            DECAY=self.gate != "none",
            REVERSE=mode == "dv",
            FIRST=first is not None,
            LAST=last is not None,
            num_warps=4,
        )
        return local

    def carry(
        self,
        mode: str,
        x: Tokens,
        y: Tokens,
        z: Tokens,
        out: Tensor | None = None,
        first: Tensor | None = None,
        last: Tensor | None = None,
        *,
        shrunk: Tensor | None = None,
        other: Tokens | None = None,
        products: Tensor | None = None,
        plain: bool = False,
        checkpoints: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> None:
        """One sequential pass, for the output or, without `out`, for the last state of each segment."""
        DX, DZ = x.data.shape[3], z.data.shape[3]
        width, slices = self.slices(DZ)
        if out is not None and self.layout.segmented:
            last = None  # that was the scan
        other, gates = other or z, checkpoints is not None
        tensors = [x.data, y.data, z.data, other.data, *self._or_unused(out)]
        tensors += [self.score_grads if mode in ("dq", "dk") else self.scores, self.decays, *self._or_unused(self.beta)]
        tensors += [self.enter, self.leave, self.total]
        tensors += self._or_unused(products, checkpoints, anchors, first, last, shrunk)
        sizes = (*x.strides, *y.strides, *z.strides, *other.strides, self.scale, self.heads, self.chunks, self.blocks)
        per_block = BLOCK // CHUNK if gates and not self.channel else 1 << 30
        ready(
            (slices * self.layout.segments.shape[0], self.heads),
            (*sizes, per_block, self.groups),
            self.sequential,
            self.dtype,
            MODE=mode,
            SUBHEADS=self.subheads,
            DX=DX,
            DZ=DZ,
            BX=padded(DX),
            BZ=width,
            OUTPUT=out is not None,
            CHANNEL=self.channel,
            DECAY=self.gate != "none",
            INSIDE=self.inside,
            # in reverse it would only make registers scarce
            CONSTANT=mode in ("o", "dq") and self.gate == "constant",
            BETA=self.inside and self.beta is not None,
            GATES=gates,
            PLAIN=plain,
            FIRST=first is not None,
            LAST=last is not None,
        )(*tensors, self.layout.segments)

    def head_grads(
        self,
        dq: Tensor,
        dk: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        decay_grad: bool,
        beta_grad: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fills dq and dk; returns the gradients of the gates, which are per head."""
        assert self.grad
        if not self.gates:
            self.carry("dq", self.grad, self.v, self.k, dq, first)
            self.carry("dk", self.v, self.grad, self.q, dk, last)
            return None, None
        slices = self.slices(self.K)[1]
        shape = (slices, self.heads, self.chunks, CHUNK)
        read, written = (self.empty(*shape, parts, dtype=FP32) for parts in (1, 2 if beta_grad else 1))
        marks: dict[str, Any] = {
            "checkpoints": self.empty(self.blocks, self.heads, self.K, self.V, dtype=FP32),
            "anchors": self.empty(slices, self.heads, self.blocks, dtype=FP32),
        }
        self.carry("dq", self.grad, self.v, self.k, dq, first, other=self.q, products=read, **marks)
        self.carry("dk", self.v, self.grad, self.q, dk, last, other=self.k, products=written, plain=beta_grad, **marks)
        wanted = (decay_grad, beta_grad)
        dg, dbeta = (self.empty(self.B, self.T, self.heads, dtype=FP32) if w else None for w in wanted)
        enqueue(
            head_gate_grads,
            (self.blocks, self.heads),
            read,
            written,
            self.rows,
            self.columns,
            self.rest,
            marks["anchors"],
            *self._or_unused(self.beta, dg, dbeta),
            self.layout.blocks,
            self.heads,
            self.chunks,
            self.blocks,
            SLICES=slices,
            BLOCK=BLOCK,
            DECAY=decay_grad,
            BETA=self.beta is not None,
            BETA_GRAD=beta_grad,
            num_warps=4,
        )
        return dg.sum((0, 1)) if dg is not None and self.gate == "constant" else dg, dbeta

    def channel_grads(
        self,
        dq: Tensor,
        dk: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        decay_grad: bool,
        beta_grad: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fills dq and dk; returns the gradients of the gates, of which the decay is per channel."""
        assert self.grad
        read, written = self.per_token(self.K), self.per_token(self.K)
        marks: dict[str, Any] = {}
        if decay_grad:
            marks["checkpoints"] = self.empty(self.chunks, self.heads, self.K, self.V)
            marks["anchors"] = self.empty(self.heads, self.chunks, self.K, dtype=FP32)
        self.carry("dq", self.grad, self.v, self.keys, read, first, **marks)
        self.carry("dk", self.v, self.grad, self.queries, written, last, **marks)
        score_grads = self.empty(self.H, self.chunks, CHUNK, CHUNK)
        diagonal = self.empty(self.H, self.chunks, CHUNK, dtype=FP32)
        enqueue(
            channel_score_grads,
            (self.chunks, self.H),
            self.v.data,
            self.grad.data,
            score_grads,
            diagonal,
            self.layout.chunks,
            self.scale,
            *self.v.strides,
            *self.grad.strides,
            self.chunks,
            V=self.V,
            BV=padded(self.V),
            **options(self.dtype, self.launch("head_scores")),
        )
        entry = self.launch("channel_grads")
        width = min(entry.block, padded(self.K))
        slices = -(-self.K // width)
        dg = self.empty(self.B, self.T, self.heads, self.K, dtype=FP32) if decay_grad else None
        dbeta = self.empty(slices, self.B, self.T, self.heads, dtype=FP32) if beta_grad else None
        for slow in (False, True):
            enqueue(
                channel_grads,
                (self.chunks * slices, self.heads),
                self.q.data,
                self.k.data,
                score_grads,
                diagonal,
                *self._or_unused(self.log_decay, self.beta),
                read,
                written,
                *self._or_unused(marks.get("anchors")),
                dq,
                dk,
                *self._or_unused(dg, dbeta),
                self.steep,
                self.layout.chunks,
                self.scale,
                *self.q.strides,
                *self.k.strides,
                self.B * self.T,
                self.heads,
                self.chunks,
                self.groups,
                SUBHEADS=self.subheads,
                K=self.K,
                BK=width,
                BETA=self.beta is not None,
                BETA_GRAD=beta_grad,
                DECAY_GRAD=decay_grad,
                SLOW=slow,
                **self.sums,
                **options(self.dtype, entry),
            )
        return dg, None if dbeta is None else dbeta.sum(0)

    def per_head(self, x: Tensor) -> Tensor:
        """[B,T,H·E,·] summed over subheads: [B,T,H,·]."""
        # with a dtype, or autocast would change it
        return x if self.subheads == 1 else x.unflatten(2, (self.H, self.subheads)).sum(3, dtype=x.dtype)

    def per_key_head(self, x: Tensor) -> Tensor:
        """[B,T,H·E,·] summed over the value heads of a key head: [B,T,G·E,·]."""
        if self.groups == 1:
            return x
        return x.unflatten(2, (-1, self.groups, self.subheads)).sum(3, dtype=x.dtype).flatten(2, 3)


def options(dtype: torch.dtype, entry: Launch) -> Mapping[str, Any]:
    """What all kernels are compiled with."""
    return {"PRECISION": "tf32x3" if dtype == FP32 else "tf32", "num_warps": entry.warps, "num_stages": entry.stages}


@lru_cache(maxsize=4096)
def ready(
    grid: tuple[int, ...], sizes: tuple[Any, ...], entry: Launch, dtype: torch.dtype, **constants: Any
) -> Prepared:
    """A sequential pass of which the tensors are missing."""
    fixed = {**constants, "WIDE": dtype == FP32, "STAGES": entry.stages, **options(dtype, entry)}
    return Prepared(carry, grid, *sizes, **fixed)


def padded(size: int) -> int:
    """The power of two that a tile has for `size`: products need 16."""
    return max(16, next_power_of_2(size))
