"""One call of the linear recurrence in Triton: its tensors, and the launches that it is made of."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..enqueue import Prepared
from .layout import BLOCK, CHUNK
from .triton_carry import carry, scan
from .triton_channel import channel_grads, channel_score_grads, channel_scores
from .triton_head import head_gate_grads, head_gates, head_scores
from .triton_plan import Strides, dense, padded, plan

SCAN_BLOCK = 1024
FP32 = torch.float32


class Tokens(NamedTuple):
    """A tensor [B,T,heads,D] as the kernels see it: tokens of all rows one after another, and two strides."""

    data: Tensor
    strides: Strides


def heads_of(*streams: Strides) -> list[int]:
    """How far the heads of each stream lie apart."""
    return [head for _, head in streams]


def tokens_of(**streams: Strides) -> dict[str, Any]:
    """How far its tokens do, which kernels are compiled for: as the heads, it is the same at each length."""
    return {f"{name}_token": token for name, (token, _) in streams.items()}


class Call:
    """Tensors and launches of one call.

    Args:
        q: Queries [B,T,G·E,K].
        k: Keys, as q.
        v: Values [B,T,H,V].
        log_decay: None, [H·E], [B,T,H·E] or [B,T,H·E,K], in fp32, contiguous.
        beta: None or [B,T,H·E], in fp32, contiguous.
        cu_seqlens: Boundaries of packed documents.
        scale: Factor of the output.
        subheads: E.
        grad: In the backward, the gradient of the output, contiguous.
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
        self.log_decay, self.beta = log_decay, beta
        self.plan = to = plan(q, k, v, log_decay, beta, cu_seqlens, scale, subheads, grad is not None, gates)
        self.dtype, self.device = to.dtype, to.device
        if any(to.copied):
            q, k, v = (x.contiguous() if copy else x for x, copy in zip((q, k, v), to.copied, strict=True))
        self.q, self.k, self.v = Tokens(q, to.q), Tokens(k, to.k), Tokens(v, to.v)
        self.grad = None if grad is None else Tokens(grad, dense(to.H, to.V))
        self.queries, self.keys = self.q, self.k
        if to.constant:
            self.gates = self.scores = self.score_grads = log_decay
        elif to.inside:
            self._head_gates()
        elif to.channel:
            self._channel_scores()
        else:
            self._head_scores()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def per_token(self, size: int) -> Tensor:
        """An uninitialised [B,T,H·E,size]."""
        return self.empty(self.plan.B, self.plan.T, self.plan.heads, size)

    def states(self) -> Tensor:
        """Uninitialised states [N,H·E,K,V]."""
        to = self.plan
        return self.empty(to.sequences, to.heads, to.K, to.V, dtype=FP32)

    def _head_gates(self) -> None:
        to = self.plan
        self.gates = self.scores = self.score_grads = self.empty(to.heads, to.chunks, to.parts, CHUNK, dtype=FP32)
        launch = to.ready(
            "gates",
            lambda: Prepared(
                head_gates,
                (to.chunks, to.heads),
                to.scale,
                to.heads,
                to.chunks,
                PARTS=to.parts,
                BETA=to.beta,
                WIDE=to.wide,
                num_warps=1,
                checked=True,
            ),
        )
        launch(self.gates, self.log_decay, self.beta, to.layout.chunks)

    def _head_scores(self) -> None:
        to, grad = self.plan, self.grad or self.v
        self.gates = self.empty(to.heads, to.chunks, to.parts, CHUNK, dtype=FP32)
        self.scores = self.score_grads = self.empty(to.heads, to.chunks, CHUNK, CHUNK)
        if to.backward:
            self.score_grads = torch.empty_like(self.scores)
        launch = to.ready(
            "scores",
            lambda: Prepared(
                head_scores,
                (to.chunks, to.heads),
                to.scale,
                *heads_of(to.q, to.k, to.v, grad.strides),
                to.chunks,
                to.groups,
                **tokens_of(q=to.q, k=to.k, v=to.v, grad=grad.strides),
                heads=to.heads,
                SUBHEADS=to.subheads,
                K=to.K,
                V=to.V,
                BK=padded(to.K),
                BV=padded(to.V),
                PARTS=to.parts,
                GATE=to.gate,
                BETA=to.beta,
                BACKWARD=to.backward,
                GATES=to.gates,
                WIDE=to.wide,
                **to.options(to.launch("head_scores")),
            ),
        )
        given = (self.q.data, self.k.data, self.v.data, grad.data, self.log_decay, self.beta)
        launch(*given, self.scores, self.score_grads, self.gates, to.layout.chunks)

    def _channel_scores(self) -> None:
        to = self.plan
        self.scores = self.score_grads = self.empty(to.heads, to.chunks, CHUNK, CHUNK)
        entering, leaving = self.per_token(to.K), self.per_token(to.K)
        self.gates = self.empty(to.heads, to.chunks, to.K, dtype=FP32)
        self.steep = self.empty(to.heads, to.chunks, dtype=torch.int8)

        def prepare(slow: bool) -> Prepared:
            entry = to.launch("channel_scores")
            return Prepared(
                channel_scores,
                (to.chunks, to.heads),
                to.scale,
                *heads_of(to.q, to.k),
                to.chunks,
                to.groups,
                **tokens_of(q=to.q, k=to.k),
                heads=to.heads,
                SUBHEADS=to.subheads,
                K=to.K,
                BK=min(entry.block, padded(to.K)),
                BETA=to.beta,
                SLOW=slow,
                **to.sums,
                **to.options(entry),
            )

        given = (self.q.data, self.k.data, self.log_decay, self.beta, self.scores, entering, leaving, self.gates)
        for slow in (False, True):
            to.ready(("scores", slow), partial(prepare, slow))(*given, self.steep, to.layout.chunks)
        strides = dense(to.heads, to.K)
        self.queries, self.keys = Tokens(entering, strides), Tokens(leaving, strides)

    def starts(self, mode: str, y: Tokens, z: Tokens, first: Tensor | None, last: Tensor | None) -> Tensor | None:
        """The states that segments start from, in forward order (mode o) or in reverse (dv); fills `last`."""
        to = self.plan
        if not to.layout.segmented:
            return first
        local = self.empty(to.segments, to.heads, to.K, to.V, dtype=FP32)
        shrunk = self.empty(to.segments, to.heads, to.K if to.channel else 1, dtype=FP32)
        self.carry(mode, y, y, z, last=local, shrunk=shrunk)
        launch = to.ready(
            ("scan", mode, first is None, last is None),
            lambda: Prepared(
                scan,
                (-(-to.K * to.V // SCAN_BLOCK), to.heads, to.sequences),
                to.heads,
                K=to.K,
                V=to.V,
                BLOCK=SCAN_BLOCK,
                CHANNEL=to.channel,
                DECAY=to.decays,
                REVERSE=mode == "dv",
                FIRST=first is not None,
                LAST=last is not None,
                num_warps=4,
                checked=True,
            ),
        )
        launch(local, shrunk, first, last, to.layout.sequences)
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
        to = self.plan
        if out is not None and to.layout.segmented:
            last = None  # that was the scan
        other = other or z

        def prepare() -> Prepared:
            DX, DZ = x.data.shape[3], z.data.shape[3]
            entry = to.sequential if out is not None else to.local
            width, slices = to.slices(DZ, entry)
            gates = checkpoints is not None
            return Prepared(
                carry,
                (slices * to.segments, to.heads),
                *heads_of(x.strides, y.strides, z.strides, other.strides),
                to.scale,
                to.chunks,
                to.blocks,
                BLOCK // CHUNK if gates and not to.channel else 1 << 30,
                to.groups,
                **tokens_of(x=x.strides, y=y.strides, z=z.strides, other=other.strides),
                heads=to.heads,
                MODE=mode,
                SUBHEADS=to.subheads,
                DX=DX,
                DZ=DZ,
                BX=padded(DX),
                BZ=width,
                PARTS=to.parts,
                OUTPUT=out is not None,
                CHANNEL=to.channel,
                DECAY=to.decays,
                INSIDE=to.inside,
                CONSTANT=to.constant,
                BETA=to.inside and to.beta,
                GATES=gates,
                PLAIN=plain,
                FIRST=first is not None,
                LAST=last is not None,
                WIDE=to.wide,
                STAGES=entry.stages,
                **to.options(entry),
            )

        launch = to.ready((mode, out is None, first is None, last is None, checkpoints is None, plain), prepare)
        scores = self.score_grads if mode in ("dq", "dk") else self.scores
        given = (x.data, y.data, z.data, other.data, out, scores, self.beta, self.gates)
        launch(*given, products, checkpoints, anchors, first, last, shrunk, to.layout.segments)

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
        to = self.plan
        if not to.gates:
            self.carry("dq", self.grad, self.v, self.k, dq, first)
            self.carry("dk", self.v, self.grad, self.q, dk, last)
            return None, None
        slices = to.slices(to.K)[1]
        shape = (slices, to.heads, to.chunks, CHUNK)
        read, written = (self.empty(*shape, parts, dtype=FP32) for parts in (1, 2 if beta_grad else 1))
        marks: dict[str, Any] = {
            "checkpoints": self.empty(to.blocks, to.heads, to.K, to.V, dtype=FP32),
            "anchors": self.empty(slices, to.heads, to.blocks, dtype=FP32),
        }
        self.carry("dq", self.grad, self.v, self.k, dq, first, other=self.q, products=read, **marks)
        self.carry("dk", self.v, self.grad, self.q, dk, last, other=self.k, products=written, plain=beta_grad, **marks)
        wanted = (decay_grad, beta_grad)
        dg, dbeta = (self.empty(to.B, to.T, to.heads, dtype=FP32) if w else None for w in wanted)
        launch = to.ready(
            ("gate grads", *wanted),
            lambda: Prepared(
                head_gate_grads,
                (to.blocks, to.heads),
                to.heads,
                to.chunks,
                to.blocks,
                PARTS=to.parts,
                SLICES=slices,
                BLOCK=BLOCK,
                DECAY=decay_grad,
                BETA=to.beta,
                BETA_GRAD=beta_grad,
                num_warps=4,
                checked=True,
            ),
        )
        launch(read, written, self.gates, marks["anchors"], self.beta, dg, dbeta, to.layout.blocks)
        return dg.sum((0, 1)) if dg is not None and to.gate == "constant" else dg, dbeta

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
        to, of_grad = self.plan, self.grad.strides
        read, written = self.per_token(to.K), self.per_token(to.K)
        marks: dict[str, Any] = {}
        if decay_grad:
            marks["checkpoints"] = self.empty(to.chunks, to.heads, to.K, to.V)
            marks["anchors"] = self.empty(to.heads, to.chunks, to.K, dtype=FP32)
        self.carry("dq", self.grad, self.v, self.keys, read, first, **marks)
        self.carry("dk", self.v, self.grad, self.queries, written, last, **marks)
        score_grads = self.empty(to.H, to.chunks, CHUNK, CHUNK)
        diagonal = self.empty(to.H, to.chunks, CHUNK, dtype=FP32)
        launch = to.ready(
            "score grads",
            lambda: Prepared(
                channel_score_grads,
                (to.chunks, to.H),
                to.scale,
                *heads_of(to.v, of_grad),
                to.chunks,
                **tokens_of(v=to.v, grad=of_grad),
                V=to.V,
                BV=padded(to.V),
                **to.options(to.launch("head_scores")),
            ),
        )
        launch(self.v.data, self.grad.data, score_grads, diagonal, to.layout.chunks)
        entry = to.launch("channel_grads")
        width = min(entry.block, padded(to.K))
        slices = -(-to.K // width)
        dg = self.empty(to.B, to.T, to.heads, to.K, dtype=FP32) if decay_grad else None
        dbeta = self.empty(slices, to.B, to.T, to.heads, dtype=FP32) if beta_grad else None

        def prepare(slow: bool) -> Prepared:
            return Prepared(
                channel_grads,
                (to.chunks * slices, to.heads),
                to.scale,
                *heads_of(to.q, to.k),
                to.B * to.T,
                to.chunks,
                to.groups,
                **tokens_of(q=to.q, k=to.k),
                heads=to.heads,
                SUBHEADS=to.subheads,
                K=to.K,
                BK=width,
                BETA=to.beta,
                BETA_GRAD=beta_grad,
                DECAY_GRAD=decay_grad,
                SLOW=slow,
                **to.sums,
                **to.options(entry),
            )

        given = (self.q.data, self.k.data, score_grads, diagonal, self.log_decay, self.beta, read, written)
        wanted = (marks.get("anchors"), dq, dk, dg, dbeta, self.steep)
        for slow in (False, True):
            to.ready(("grads", decay_grad, beta_grad, slow), partial(prepare, slow))(*given, *wanted, to.layout.chunks)
        return dg, None if dbeta is None else dbeta.sum(0)

    def per_head(self, x: Tensor) -> Tensor:
        """[B,T,H·E,·] summed over subheads: [B,T,H,·]."""
        # with a dtype, or autocast would change it
        to = self.plan
        return x if to.subheads == 1 else x.unflatten(2, (to.H, to.subheads)).sum(3, dtype=x.dtype)

    def per_key_head(self, x: Tensor) -> Tensor:
        """[B,T,H·E,·] summed over the value heads of a key head: [B,T,G·E,·]."""
        to = self.plan
        if to.groups == 1:
            return x
        return x.unflatten(2, (-1, to.groups, to.subheads)).sum(3, dtype=x.dtype).flatten(2, 3)
