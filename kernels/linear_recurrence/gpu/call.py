"""One call of the linear recurrence in Triton: its tensors, and the launches on them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...gpu import tiles
from ...gpu.layout import CHUNK
from ...gpu.reductions import add_heads, add_subheads
from .plan import PASSES, LinearRecurrence, gate_of, states_of_chunks, sums_of_chunks

if TYPE_CHECKING:
    from .op import Arguments

FP32 = torch.float32
LEAST, LOG2E = tiles.LEAST.value, tiles.LOG2E.value


class Call:
    """Tensors of one call.

    Args:
        args: Arguments of the op.
        grad: In the backward pass, the gradient of the output, contiguous.
        gates: In the backward pass, whether log_decay or beta needs a gradient.
    """

    def __init__(self, args: "Arguments", grad: Tensor | None = None, gates: bool = False):
        q, k, v, log_decay, beta = args[:5]
        self.log_decay, self.beta = log_decay, beta
        sizes = q.shape, q.stride(), k.stride(), v.shape, v.stride(), q.dtype, q.device
        dtype = torch.float32 if log_decay is None else log_decay.dtype
        how = gate_of(log_decay), beta is not None, args.scale, args.subheads, grad is not None, gates, dtype
        self.plan = plan = LinearRecurrence.of(args.cu_seqlens, q.shape[1], *sizes, *how)
        if any(plan.copied):
            q, k, v = (x.contiguous() if copy else x for x, copy in zip((q, k, v), plan.copied, strict=True))
        if plan.aligned:
            q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v))
            grad = grad if grad is None or grad.data_ptr() % 16 == 0 else grad.clone()
        self.streams = {"q": q, "k": k, "v": v, "queries": q, "keys": k}
        if grad is not None:
            self.streams["grad"] = grad
        self.scores: Tensor | None = None
        self.score_grads: Tensor | None = None
        if plan.one_pass:
            return
        if plan.constant:
            self.gates = log_decay
        elif plan.inside:
            self.gates = plan.new(plan.heads, plan.chunks, plan.parts, CHUNK, dtype=FP32)
            plan.head_gates()(self.gates, log_decay, beta, plan.layout.chunks)
        elif plan.channel:
            self._channel_scores(q, k)
        else:
            self._head_scores(q, k, v, grad)

    def _head_scores(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> None:
        plan = self.plan
        self.gates = plan.new(plan.heads, plan.chunks, plan.parts, CHUNK, dtype=FP32)
        self.scores = plan.new(plan.heads, plan.chunks, CHUNK, CHUNK)
        self.score_grads = None if grad is None else torch.empty_like(self.scores)
        args = (q, k, v, grad, self.log_decay, self.beta, self.scores, self.score_grads, self.gates)
        plan.head_scores()(*args, plan.layout.chunks)

    def _channel_scores(self, q: Tensor, k: Tensor) -> None:
        plan = self.plan
        self.scores = self.score_grads = plan.new(plan.heads, plan.chunks, CHUNK, CHUNK)
        self.streams["queries"], self.streams["keys"] = entering, leaving = (
            self.per_token(plan.K),
            self.per_token(plan.K),
        )
        self.gates = plan.new(plan.heads, plan.chunks, plan.K, dtype=FP32)
        self.steep = plan.new(plan.heads, plan.chunks, dtype=torch.int8)
        args = (q, k, self.log_decay, self.beta, self.scores, entering, leaving, self.gates, self.steep)
        for slow in (False, True):
            plan.channel_scores(slow)(*args, plan.layout.chunks)

    def per_token(self, size: int) -> Tensor:
        """An uninitialised [B,T,H·E,size]."""
        return self.plan.new(self.plan.B, self.plan.T, self.plan.heads, size)

    def states(self) -> Tensor:
        """Uninitialised states [N,H·E,K,V]."""
        plan = self.plan
        return plan.new(plan.sequences, plan.heads, plan.K, plan.V, dtype=FP32)

    def starts(self, mode: str, first: Tensor | None, last: Tensor | None) -> Tensor | None:
        """The states that segments start from, forward (mode o) or in reverse (dv); fills `last` if there are cuts."""
        plan = self.plan
        if not plan.segmented:
            return first
        local = plan.new(plan.segments, plan.heads, plan.K, plan.V, dtype=FP32)
        shrunk = plan.new(plan.segments, plan.heads, plan.K if plan.channel else 1, dtype=FP32)
        if plan.one_pass:
            self._channel_states(mode == "dv", last=local, shrunk=shrunk)
        else:
            self.carry(mode, last=local, shrunk=shrunk)
        plan.scan(mode == "dv")(local, shrunk, first, last, plan.layout.sequences)
        return local

    def outputs(self, o: Tensor, first: Tensor | None, last: Tensor, keep: bool) -> tuple[Tensor, Tensor] | None:
        """Fill o, and if sequences are not cut the last states as well.

        Returns:
            The states before all chunks and the sums of decays in them, which the gradients need, if these are to be
            kept and one pass does all; otherwise None.
        """
        plan = self.plan
        if not plan.one_pass:
            self.carry("o", o, first, last)
            return None
        q, k, v = (self.streams[name] for name in "qkv")
        states, ends = self._states_of_chunks() if keep else None, self._sums_of_chunks()
        inputs, final = (k, v, self.log_decay, o), None if plan.segmented else last
        plan.channel_forward()(q, *inputs, states, ends, first, final, plan.layout.segments)
        plan.steep_forward()(q, *inputs, ends, plan.layout.chunks)
        return None if states is None else (states, ends)

    def _states_of_chunks(self) -> Tensor:
        """Uninitialised states before all chunks."""
        return self.plan.new(*states_of_chunks(self.plan.slots, self.plan.heads, self.plan.K, self.plan.V))

    def _sums_of_chunks(self) -> Tensor:
        """Uninitialised sums of the decays in both halves of all chunks."""
        return self.plan.new(*sums_of_chunks(self.plan.slots, self.plan.heads, self.plan.K), dtype=FP32)

    def gradients(
        self,
        first: Tensor | None,
        states: Tensor | None,
        ends: Tensor | None,
        last: Tensor | None,
        first_grad: Tensor | None,
        decay_grad: bool,
        beta_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The gradients of q, k and v per recurrence, and of log_decay and beta.

        Args:
            first: The states that segments start from; not needed with `states`.
            states: What `outputs` kept.
            ends: Likewise.
            last: The gradients of the states that they end with.
            first_grad: Where to put the gradient of the initial states, if sequences are not cut.
            decay_grad: Whether log_decay needs a gradient.
            beta_grad: Whether beta needs one.
        """
        plan = self.plan
        dq, dk, dv = (self.per_token(size) for size in (plan.K, plan.K, plan.V))
        if plan.one_pass:
            if states is None or ends is None:
                states, ends = self._states_of_chunks(), self._sums_of_chunks()
                self._channel_states(False, states, ends, first)
            args = (dq, dk, dv, states, ends, last, first_grad, decay_grad)
            return dq, dk, dv, self._channel_backward(*args), None
        if plan.head_pass:
            return dq, dk, dv, self._head_backward(dq, dk, dv, first, last, first_grad, decay_grad), None
        self.carry("dv", dv, last, first_grad)
        finish = self.channel_grads if plan.channel else self.head_grads
        return dq, dk, dv, *finish(dq, dk, first, last, decay_grad, beta_grad)

    def _channel_states(
        self,
        reverse: bool,
        states: Tensor | None = None,
        ends: Tensor | None = None,
        first: Tensor | None = None,
        last: Tensor | None = None,
        shrunk: Tensor | None = None,
    ) -> None:
        """The states before all chunks, or the last one of each segment, in reverse their gradients."""
        x, y = ("q", "grad") if reverse else ("k", "v")
        args = (self.streams[y], self.log_decay, states, ends, first, last, shrunk)
        self.plan.channel_states(reverse)(self.streams[x], *args, self.plan.layout.segments)

    def _channel_backward(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        states: Tensor,
        ends: Tensor,
        last: Tensor | None,
        first_grad: Tensor | None,
        decay_grad: bool,
    ) -> Tensor | None:
        """Fill dq, dk and dv; return the gradient of log_decay, which is per channel."""
        plan, (q, k, v, grad) = self.plan, (self.streams[name] for name in ("q", "k", "v", "grad"))
        dg = plan.new(plan.B, plan.T, plan.heads, plan.K, dtype=plan.decay_dtype) if decay_grad else None
        inputs, results = (k, v, grad, self.log_decay), (dq, dk, dv, dg)
        first_grad = None if plan.segmented else first_grad
        plan.channel_backward()(q, *inputs, states, ends, *results, last, first_grad, plan.layout.segments)
        plan.steep_backward()(q, *inputs, ends, *results, plan.layout.chunks)
        return dg

    def _head_backward(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        first_grad: Tensor | None,
        decay_grad: bool,
    ) -> Tensor | None:
        """Fill dq, dk and dv; return the gradient of log_decay, which is per head or constant."""
        plan, (q, k, v, grad) = self.plan, (self.streams[name] for name in ("q", "k", "v", "grad"))
        states = plan.new(plan.chunks, plan.heads, plan.K, plan.V)
        plan.head_states()(k, v, self.gates, states, first, plan.layout.segments)
        dg = plan.new(plan.B, plan.T, plan.heads, dtype=FP32) if decay_grad else None
        results = (dq, dk, dv, dg, last, None if plan.segmented else first_grad)
        plan.head_backward()(q, k, v, grad, self.gates, states, *results, plan.layout.segments)
        if dg is not None and self.log_decay is not None:
            dg.masked_fill_(self.log_decay * LOG2E <= LEAST, 0)  # nothing passes a reset
        return dg.sum((0, 1)) if dg is not None and plan.gate == "constant" else dg

    def carry(
        self,
        mode: str,
        out: Tensor | None = None,
        first: Tensor | None = None,
        last: Tensor | None = None,
        *,
        shrunk: Tensor | None = None,
        products: Tensor | None = None,
        plain: bool = False,
        checkpoints: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> None:
        """One sequential pass, for the output or, without `out`, for the last state of each segment."""
        plan = self.plan
        if out is not None and plan.segmented:
            last = None  # the scan has filled it
        x, y, z, other = map(self.streams.__getitem__, PASSES[mode])
        scores = self.score_grads if mode in ("dq", "dk") else self.scores
        launch = plan.carry(mode, out is not None, checkpoints is not None, plain)
        operands = (x, y, z, other, out, scores, self.beta if plan.inside else None, self.gates)
        launch(*operands, products, checkpoints, anchors, first, last, shrunk, plan.layout.segments)

    def head_grads(
        self,
        dq: Tensor,
        dk: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        decay_grad: bool,
        beta_grad: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill dq and dk; return the gradients of log_decay and beta, which are per head."""
        plan = self.plan
        if not plan.gates:
            self.carry("dq", dq, first)
            self.carry("dk", dk, last)
            return None, None
        slices = plan.slices(plan.K, plan.entry("carry"))[1]
        shape = (slices, plan.heads, plan.chunks, CHUNK)
        read, written = (plan.new(*shape, parts, dtype=FP32) for parts in (1, 2 if beta_grad else 1))
        checkpoints = plan.new(plan.blocks, plan.heads, plan.K, plan.V, dtype=FP32)
        anchors = plan.new(slices, plan.heads, plan.blocks, dtype=FP32)
        self.carry("dq", dq, first, products=read, checkpoints=checkpoints, anchors=anchors)
        marks = {"checkpoints": checkpoints, "anchors": anchors}
        self.carry("dk", dk, last, products=written, plain=beta_grad, **marks)
        dg, dbeta = (plan.new(plan.B, plan.T, plan.heads, dtype=FP32) if w else None for w in (decay_grad, beta_grad))
        plan.head_gate_grads()(read, written, self.gates, self.log_decay, anchors, dg, dbeta, plan.layout.blocks)
        return dg.sum((0, 1)) if dg is not None and plan.gate == "constant" else dg, dbeta

    def channel_grads(
        self,
        dq: Tensor,
        dk: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        decay_grad: bool,
        beta_grad: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill dq and dk; return the gradients of log_decay, which is per channel, and of beta."""
        plan, (q, k, v, grad) = self.plan, (self.streams[name] for name in ("q", "k", "v", "grad"))
        read, written = self.per_token(plan.K), self.per_token(plan.K)
        checkpoints = plan.new(plan.chunks, plan.heads, plan.K, plan.V) if decay_grad else None
        anchors = plan.new(plan.heads, plan.chunks, plan.K, dtype=FP32) if decay_grad else None
        self.carry("dq", read, first, checkpoints=checkpoints, anchors=anchors)
        self.carry("dk", written, last, checkpoints=checkpoints, anchors=anchors)
        score_grads, diagonal = (
            plan.new(plan.H, plan.chunks, CHUNK, CHUNK),
            plan.new(plan.H, plan.chunks, CHUNK, dtype=FP32),
        )
        plan.channel_score_grads()(v, grad, score_grads, diagonal, plan.layout.chunks)
        dg = plan.new(plan.B, plan.T, plan.heads, plan.K, dtype=FP32) if decay_grad else None
        slices = plan.slices(plan.K, plan.entry("channel_grads"))[1]
        dbeta = plan.new(slices, plan.B, plan.T, plan.heads, dtype=FP32) if beta_grad else None
        args = (q, k, score_grads, diagonal, self.log_decay, self.beta, read, written, anchors, dq, dk, dg, dbeta)
        for slow in (False, True):
            plan.channel_grads(slow)(*args, self.steep, plan.layout.chunks)
        return dg, None if dbeta is None else dbeta.sum(0)

    def per_head(self, x: Tensor) -> Tensor:
        """[B,T,H·E,·] summed over subheads: [B,T,H,·]."""
        return add_subheads(x, self.plan.subheads)

    def per_key_head(self, x: Tensor) -> Tensor:
        """[B,T,H·E,·] summed over the value heads of a key head: [B,T,G·E,·]."""
        return add_heads(x, self.plan.groups, self.plan.subheads)
