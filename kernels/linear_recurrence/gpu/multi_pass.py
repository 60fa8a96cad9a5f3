"""The linear recurrence in several launches: gates and scores of all chunks, sequential passes, gradients of gates."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu import tiles
from ...gpu.launch import LaunchSpec
from ...gpu.layout import CHUNK
from ...gpu.plan import prepared
from ...gpu.reductions import add_outer, add_subheads
from .call import FP32, Arguments, Call, InputGradients, Saved, Wanted, sum_over_tokens
from .one_pass import QKV_GRAD, in_gluon
from .plan import BLOCK, LinearRecurrence, padded
from .scalar_decay import head_gate_grads, head_gates, head_scores
from .segments import segment_states
from .sequential_pass import output_pass
from .vector_decay import channel_grads, channel_score_grads, channel_scores

LEAST, LOG2E = tiles.LEAST.value, tiles.LOG2E.value
# x, y and z of the sequential passes (`sequential_pass.py`), and `other`, for the gradients of the gates
PASSES = {
    "o": ("queries", "keys", "v", "v"),
    "dq": ("grad", "v", "keys", "queries"),
    "dk": ("v", "grad", "queries", "keys"),
    "dv": ("keys", "queries", "grad", "grad"),
}


class ForGates(NamedTuple):
    """Tensors that a pass fills for the gradients of the gates."""

    products: Tensor | None = None  # Σ other · (the state's part of the output), per token
    checkpoints: Tensor | None = None  # states at the ends of blocks, or before all chunks
    anchors: Tensor | None = None  # <S,dS> there
    plain: bool = False  # whether the products are also stored without the decays, for the gradient of β


class MultiPass(Call):
    """A call without a kernel that does everything."""

    def __init__(self, plan: LinearRecurrence, args: Arguments, grad: Tensor | None):
        super().__init__(plan, args, grad)
        q, k, v, log_decay, beta, chunks = self.q, self.k, self.v, self.log_decay, self.beta, plan.layout.chunks
        self.streams = {"q": q, "k": k, "v": v, "queries": q, "keys": k}
        if grad is not None and self.grad is not None:
            self.streams["grad"] = self.grad
        self.gates, self.scores, self.score_grads = log_decay, None, None
        if not plan.channel and not plan.constant:
            self.gates = plan.new(plan.heads, plan.chunks, plan.parts, CHUNK, dtype=FP32)
        if not plan.scores_in_pass:
            self.scores = self.score_grads = plan.new(plan.heads, plan.chunks, CHUNK, CHUNK)
        if plan.channel:
            self.streams["queries"], self.streams["keys"] = plan.per_token(plan.K), plan.per_token(plan.K)
            self.gates = plan.new(plan.heads, plan.chunks, plan.K, dtype=FP32)
            decayed = self.streams["queries"], self.streams["keys"]
            _channel_scores(plan)(q, k, log_decay, beta, self.scores, *decayed, self.gates, plan.sums(), chunks)
        elif not plan.scores_in_pass:
            self.score_grads = None if grad is None or self.scores is None else torch.empty_like(self.scores)
            tensors = (q, k, v, self.grad, log_decay, beta, self.scores, self.score_grads, self.gates)
            _head_scores(plan)(*tensors, chunks)
        elif not plan.constant:
            assert self.gates is not None
            _head_gates(plan)(self.gates, log_decay, beta, chunks)

    def output(self, o: Tensor, first: Tensor | None, last: Tensor | None, *, keep: bool) -> Saved:
        self.sequential_pass("o", o, first, last)
        return Saved()

    def segment_states(self, last: Tensor, survives: Tensor, *, reverse: bool) -> None:
        plan, (_, y, z, _) = self.plan, PASSES["dv" if reverse else "o"]
        beta = self.beta if plan.constant else None
        tensors = (self.streams[y], self.streams[z], beta, self.gates, last, survives)
        _segment_states(plan, reverse)(*tensors, plan.layout.segments)

    def sequential_pass(
        self, mode: str, out: Tensor, first: Tensor | None, last: Tensor | None = None, store: ForGates | None = None
    ) -> None:
        """Fill `out`, and `last` with the states at the ends of the sequences, unless a scan has filled it."""
        plan, store = self.plan, store or ForGates()
        x, y, z, other = map(self.streams.__getitem__, PASSES[mode])
        scores = self.score_grads if mode in ("dq", "dk") else self.scores
        launch = _output_pass(plan, mode, store.checkpoints is not None, store.plain)
        operands = (x, y, z, other, out, scores, self.beta if plan.scores_in_pass else None, self.gates)
        last = None if plan.segmented else last
        launch(*operands, *store[:3], first, last, plan.layout.segments)

    def gradients(self, saved: Saved, last: Tensor | None, first_grad: Tensor | None, wanted: Wanted) -> InputGradients:
        plan, first = self.plan, saved.first
        dq, dk, dv = (plan.per_token(size) for size in (plan.K, plan.K, plan.V))
        if plan.path == "hopper_scalar_decay":
            gates = self._hopper(dq, dk, dv, first, last, first_grad, wanted)
            return InputGradients(dq, dk, add_subheads(dv, plan.subheads), *gates)
        self.sequential_pass("dv", dv, last, first_grad)
        dv = add_subheads(dv, plan.subheads)
        if plan.channel:
            return InputGradients(dq, dk, dv, *self._vector_decay(dq, dk, first, last, wanted))
        if plan.gate_gradients:
            return InputGradients(dq, dk, dv, *self._scalar_decay(dq, dk, first, last, wanted))
        self.sequential_pass("dq", dq, first)
        self.sequential_pass("dk", dk, last)
        return InputGradients(dq, dk, dv)

    def _hopper(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        first_grad: Tensor | None,
        wanted: Wanted,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill dq, dk and dv in Gluon, from the states before all chunks; return those of log_decay and beta."""
        plan, (k, v) = self.plan, (self.k, self.v)
        states = plan.new(plan.chunks, plan.heads, plan.K, plan.V)
        _hopper_states(plan)(k, v, self.gates, states, first, plan.layout.segments)
        dg, dbeta = (plan.new(plan.B, plan.T, plan.heads, dtype=FP32) if want else None for want in wanted)
        results = (dq, dk, dv, dg, dbeta, last, None if plan.segmented else first_grad)
        _hopper_gradients(plan)(self.q, k, v, self.grad, self.gates, states, *results, plan.layout.segments)
        if dg is not None and self.log_decay is not None:
            dg.masked_fill_(self.log_decay * LOG2E <= LEAST, 0)  # nothing passes a reset
        return sum_over_tokens(plan, dg), dbeta

    def _scalar_decay(
        self, dq: Tensor, dk: Tensor, first: Tensor | None, last: Tensor | None, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill dq and dk; return the gradients of log_decay and beta, which are per head."""
        plan = self.plan
        slices = plan.slices(plan.K, plan.entry("carry"))[1]
        shape = (slices, plan.heads, plan.chunks, CHUNK)
        read, written = (plan.new(*shape, parts, dtype=FP32) for parts in (1, 2 if wanted.beta else 1))
        checkpoints = plan.new(plan.blocks, plan.heads, plan.K, plan.V, dtype=FP32)
        anchors = plan.new(slices, plan.heads, plan.blocks, dtype=FP32)
        self.sequential_pass("dq", dq, first, store=ForGates(read, checkpoints, anchors))
        self.sequential_pass("dk", dk, last, store=ForGates(written, checkpoints, anchors, wanted.beta))
        dg, dbeta = (plan.new(plan.B, plan.T, plan.heads, dtype=FP32) if want else None for want in wanted)
        _head_gate_grads(plan)(read, written, self.gates, self.log_decay, anchors, dg, dbeta, plan.layout.blocks)
        return sum_over_tokens(plan, dg), dbeta

    def _vector_decay(
        self, dq: Tensor, dk: Tensor, first: Tensor | None, last: Tensor | None, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill dq and dk; return the gradients of log_decay, which is per channel, and of beta."""
        plan = self.plan
        read, written = plan.per_token(plan.K), plan.per_token(plan.K)
        checkpoints = plan.new(plan.chunks, plan.heads, plan.K, plan.V) if wanted.log_decay else None
        anchors = plan.new(plan.heads, plan.chunks, plan.K, dtype=FP32) if wanted.log_decay else None
        store = ForGates(None, checkpoints, anchors)
        self.sequential_pass("dq", read, first, store=store)
        self.sequential_pass("dk", written, last, store=store)
        score_grads = plan.new(plan.H, plan.chunks, CHUNK, CHUNK)
        diagonal = plan.new(plan.H, plan.chunks, CHUNK, dtype=FP32)
        _channel_score_grads(plan)(self.v, self.grad, score_grads, diagonal, plan.layout.chunks)
        dg = plan.per_token(plan.K, FP32) if wanted.log_decay else None
        slices = plan.slices(plan.K, plan.entry("channel_grads"))[1]
        dbeta = plan.new(slices, plan.B, plan.T, plan.heads, dtype=FP32) if wanted.beta else None
        inputs = (self.k, score_grads, diagonal, self.log_decay, self.beta, read, written, anchors)
        _channel_grads(plan)(self.q, *inputs, dq, dk, dg, dbeta, plan.sums(), plan.layout.chunks)
        return dg, None if dbeta is None else add_outer(dbeta, FP32)


def _whole_heads(plan: LinearRecurrence) -> dict[str, Any]:
    """Constants of kernels that hold all channels of a head."""
    return {"K": plan.K, "V": plan.V, "BK": padded(plan.K), "BV": padded(plan.V)}


def _of_gates(plan: LinearRecurrence) -> dict[str, Any]:
    """Constants of kernels that compute the gates of a chunk."""
    return {"PARTS": plan.parts, "GATE": plan.gate, "WIDE": plan.wide}


@prepared
def _head_gates(plan: LinearRecurrence) -> LaunchSpec:
    """The gates, where passes compute the scores."""
    numbers, how = (plan.scale, plan.heads, plan.chunks), {**_of_gates(plan), "KEEP": plan.gluon}
    return LaunchSpec(head_gates, plan.chunks * plan.heads, *numbers, **how, warps=1, checked=True)


@prepared
def _head_scores(plan: LinearRecurrence) -> LaunchSpec:
    """The gates and the scores, and in the backward pass the gradients of the scores."""
    heads, tokens = plan.strides(q="q", k="k", v="v", grad="grad" if plan.backward else "v")
    return LaunchSpec(
        head_scores,
        plan.chunks * plan.heads,
        *(plan.scale, *heads, plan.chunks, plan.groups),
        **tokens,
        heads=plan.heads,
        SUBHEADS=plan.subheads,
        GATES=plan.gate_gradients,
        **_whole_heads(plan),
        **_of_gates(plan),
        **plan.options(plan.entry("head_scores")),
    )


@prepared
def _channel_scores(plan: LinearRecurrence) -> LaunchSpec:
    """The scores, and queries and keys with their decays applied."""
    (heads, tokens), entry = plan.strides(q="q", k="k"), plan.entry("channel_scores")
    return LaunchSpec(
        channel_scores,
        plan.chunks * plan.heads,
        *(plan.scale, *heads, plan.chunks, plan.groups),
        **tokens,
        heads=plan.heads,
        SUBHEADS=plan.subheads,
        K=plan.K,
        BK=min(entry.block, padded(plan.K)),
        **plan.of_sums,
        **plan.options(entry),
    )


def _of_states(plan: LinearRecurrence) -> dict[str, Any]:
    """Constants of kernels that carry a state from chunk to chunk."""
    how: dict[str, Any] = {"CHANNEL": plan.channel, "DECAY": plan.gate != "none", "CONSTANT": plan.constant}
    return {**how, "PARTS": plan.parts, "heads": plan.heads, "SUBHEADS": plan.subheads}


@prepared
def _output_pass(plan: LinearRecurrence, mode: str, gates: bool, plain: bool) -> LaunchSpec:
    """A sequential pass.

    Args:
        plan: The plan.
        mode: A key of `PASSES`.
        gates: Whether it stores what the gradients of the gates need.
        plain: Whether it also stores what the gradient of β needs.
    """
    x, y, z, other = PASSES[mode]
    heads, tokens = plan.strides(x=x, y=y, z=z, other=other if gates and not plan.channel else z)
    DX, DZ = plan.streams[x].size, plan.streams[z].size
    entry = plan.entry("carry")
    width, slices = plan.slices(DZ, entry)
    per_block = BLOCK // CHUNK if gates and not plan.channel else 1 << 30
    return LaunchSpec(
        output_pass,
        slices * plan.segments * plan.heads,
        *(*heads, plan.scale, plan.chunks, plan.blocks, per_block, plan.groups),
        **tokens,
        **_of_states(plan),
        MODE=mode,
        DX=DX,
        DZ=DZ,
        BX=padded(DX),
        BZ=width,
        PLAIN=plain,
        WIDE=plan.wide,
        STAGES=entry.stages,
        **plan.options(entry),
    )


@prepared
def _segment_states(plan: LinearRecurrence, reverse: bool) -> LaunchSpec:
    """The states that segments add, or in reverse their gradients."""
    _, y, z, _ = PASSES["dv" if reverse else "o"]
    (heads, tokens), entry = plan.strides(y=y, z=z), plan.entry("local")
    width, slices = plan.slices(plan.V, entry)
    return LaunchSpec(
        segment_states,
        slices * plan.segments * plan.heads,
        *(*heads, plan.scale, plan.chunks, plan.groups),
        **tokens,
        **_of_states(plan),
        K=plan.K,
        V=plan.V,
        BK=padded(plan.K),
        BV=width,
        REVERSE=reverse,
        STAGES=entry.stages,
        **plan.options(entry),
    )


@prepared
def _head_gate_grads(plan: LinearRecurrence) -> LaunchSpec:
    """The gradients of the gates, if they are per head."""
    numbers = plan.heads, plan.chunks, plan.blocks
    sizes: dict[str, Any] = {"PARTS": plan.parts, "GATE": plan.gate, "BLOCK": BLOCK}
    slices = plan.slices(plan.K, plan.entry("carry"))[1]
    return LaunchSpec(head_gate_grads, plan.blocks * plan.heads, *numbers, **sizes, SLICES=slices, checked=True)


@prepared
def _channel_score_grads(plan: LinearRecurrence) -> LaunchSpec:
    """The gradients of the scores."""
    heads, tokens = plan.strides(v="v", grad="grad")
    sizes: dict[str, Any] = {**tokens, "V": plan.V, "BV": padded(plan.V)}
    options = plan.options(plan.entry("head_scores"))
    return LaunchSpec(channel_score_grads, plan.chunks * plan.H, plan.scale, *heads, plan.chunks, **sizes, **options)


@prepared
def _channel_grads(plan: LinearRecurrence) -> LaunchSpec:
    """The gradients of q, k and the gates, if the decay is per channel."""
    (heads, tokens), entry = plan.strides(q="q", k="k"), plan.entry("channel_grads")
    width, slices = plan.slices(plan.K, entry)
    return LaunchSpec(
        channel_grads,
        plan.chunks * slices * plan.heads,
        *(plan.scale, *heads, plan.B * plan.T, plan.chunks, plan.groups),
        **tokens,
        heads=plan.heads,
        SUBHEADS=plan.subheads,
        K=plan.K,
        BK=width,
        **plan.of_sums,
        **plan.options(entry),
    )


@prepared
def _hopper_states(plan: LinearRecurrence) -> LaunchSpec:
    """The states before all chunks, for `_hopper_gradients`."""
    from .hopper_scalar_decay import states  # other devices do without Gluon

    return in_gluon(plan, states, {"k": "k", "v": "v"}, V=plan.V)


@prepared
def _hopper_gradients(plan: LinearRecurrence) -> LaunchSpec:
    """All gradients, if decays are per head, constant or none."""
    from .hopper_scalar_decay import gradients

    return in_gluon(plan, gradients, QKV_GRAD, V=plan.V, BETA=plan.sizes.beta)
