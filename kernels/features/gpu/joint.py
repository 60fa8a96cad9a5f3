"""Features of several streams, and the gates, as one node of autograd.

With a node for each stream, autograd would concatenate the gradients of the columns of their projection. That copy
takes 2 % of a training step of 400M parameters. If the streams, the inputs of the gates and what other ops read are
together all columns of a projection, this node writes the gradients into one tensor. What other ops read passes through
it, so that it can copy those gradients there as well.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import once, plain
from ...core.deterministic import in_mode, is_deterministic
from ...delta_gates import GateInputs
from ...delta_gates.gpu import op as gate_op
from ...gpu.rows import copy_rows
from ...linear.columns import columns_of
from ..arguments import FeatureStream
from . import op


class Step(NamedTuple):
    """An op of the node."""

    make: Callable[..., Any]  # its arguments, a NamedTuple that begins with the tensors
    tensors: int
    results: int
    compute: Callable[[Any], tuple[Tensor, ...]]
    # gradients by name, from the arguments, which of them need one, gradients of the results, and memory for `inputs`
    differentiate: Callable[..., Any]
    inputs: tuple[str, ...]  # arguments that may be columns of a projection


FEATURES = Step(op.Arguments, 5, 1, op.compute, op.differentiate, ("x",))
GATES = Step(gate_op.Arguments, 5, 2, gate_op.compute, gate_op.differentiate, ("a", "b"))


def fits(streams: Sequence[FeatureStream], gates: GateInputs | None) -> bool:
    """Return whether one node can serve all: they are differentiated, and without states."""
    tensors = [x for stream in streams for x in (stream.x, stream.weight, stream.bias)]
    return (
        plain(tensors if gates is None else [*tensors, *gates.tensors])
        and all(
            stream.differentiated and not stream.is_identity and stream.history is None and not stream.return_history
            for stream in streams
        )
        and (gates is None or (gates.differentiated and gates.b is not None))
    )


def forward(
    streams: Sequence[FeatureStream], gates: GateInputs | None, others: Sequence[Tensor]
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor, Tensor] | None, list[Tensor]]:
    """y of each stream, log decay and β, and the others."""
    steps, features = [FEATURES] * len(streams), [op.arguments(stream) for stream in streams]
    calls: list[Any] = [*features]
    inputs = [stream.x for stream in streams]
    if gates is not None:
        gates = gates.multiplied()
        assert gates.b is not None
        steps, calls, inputs = [*steps, GATES], [*calls, gate_op.arguments(gates)], [*inputs, gates.a, gates.b]
    columns = columns_of([*inputs, *others], 2) if all(x.requires_grad for x in (*inputs, *others)) else None
    passing = [] if columns is None else list(others)
    tensors = [x for step, call in zip(steps, calls, strict=True) for x in call[: step.tensors]]
    options = [call[step.tensors :] for step, call in zip(steps, calls, strict=True)]
    results = _Joint.apply(steps, options, columns, is_deterministic(), *tensors, *passing)
    outputs: list[tuple[Tensor, Tensor | None]] = [
        (op.recomputed(y, args, stream.kept), None) for y, stream, args in zip(results, streams, features, strict=False)
    ]
    end = len(streams)
    both = None if gates is None else (results[end], results[end + 1])
    return outputs, both, list(results[len(results) - len(passing) :]) if passing else list(others)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: Sequence[Step],
        options: Sequence[Any],
        columns: Sequence[int] | None,
        mode: bool,
        *tensors: Tensor | None,
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.options, ctx.columns, ctx.mode = steps, options, columns, mode
        ctx.save_for_backward(*tensors)
        calls, passing = _calls(steps, options, tensors)
        outputs: list[Any] = []
        for step, args in zip(steps, calls, strict=True):
            outputs += in_mode(mode, step.compute, args)
        return *outputs, *passing

    @staticmethod
    def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        calls, passed = _calls(ctx.steps, ctx.options, ctx.saved_tensors)
        wanted, _ = _calls(ctx.steps, ctx.options, ctx.needs_input_grad[4:])
        inputs = [getattr(args, name) for step, args in zip(ctx.steps, calls, strict=True) for name in step.inputs]
        memory, arriving = iter(_new([*inputs, *passed], ctx.columns)), iter(gradients)
        returned: list[Tensor | None] = []
        for step, args, want in zip(ctx.steps, calls, wanted, strict=True):
            incoming, own = [*islice(arriving, step.results)], [*islice(memory, len(step.inputs))]
            if all(g is None for g in incoming):
                by_name = {name: x.zero_() for name, x in zip(step.inputs, own, strict=True)}
            else:
                by_name = in_mode(ctx.mode, step.differentiate, args, want, *incoming, *own)
            names = args._fields[: step.tensors]
            returned += [by_name.get(name) if want[i] else None for i, name in enumerate(names)]
        for place, g in zip(memory, arriving, strict=True):
            if g is None:
                place.zero_()
            else:
                rows = (*g.shape[:2], math.prod(g.shape[2:]))
                copy_rows(g.reshape(rows), place.view(rows))
            returned.append(place)
        return None, None, None, None, *returned

    backward = staticmethod(once(_differentiate))


def _new(inputs: Sequence[Tensor], columns: Sequence[int] | None) -> list[Tensor]:
    """Uninitialised gradients of the inputs [B,T,…]: columns of one tensor that start here, or separate tensors."""
    if columns is None:
        return [new(x) for x in inputs]
    widths = [math.prod(x.shape[2:]) for x in inputs]
    B, T = inputs[0].shape[:2]
    gradient = new(inputs[0], B, T, sum(widths))
    places = zip(inputs, columns, widths, strict=True)
    return [gradient[..., column : column + width].view(x.shape) for x, column, width in places]


def _calls(steps: Sequence[Step], options: Sequence[Any], tensors: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """The arguments of each step, and the tensors that are left."""
    calls, at = [], 0
    for step, rest in zip(steps, options, strict=True):
        calls.append(step.make(*tensors[at : at + step.tensors], *rest))
        at += step.tensors
    return calls, tensors[at:]
