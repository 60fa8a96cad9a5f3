"""Features of several streams, and the gates, as one node of autograd.

The streams of a layer are columns of one projection. Separate nodes would return the gradients of some columns each,
which the backward pass would concatenate: a copy that takes 2 % of a training step of 400M parameters. In this node the
kernels write into the columns of one tensor. What other ops read passes through the node, which copies its gradients.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import gradients_like
from ...core.autograd import once, plain
from ...core.deterministic import in_mode, is_deterministic
from ...delta_gates import GateInputs
from ...delta_gates.gpu import op as gate_op
from ...gpu.rows import copy_rows
from ..arguments import FeatureStream
from . import op


class Step(NamedTuple):
    """An op of the node."""

    make: Callable[..., Any]  # its arguments, a NamedTuple that begins with the tensors
    tensors: int
    results: int
    compute: Callable[[Any], tuple[Tensor, ...]]
    # the gradients by name, from arguments, which of them are needed, gradients, and memory for those of `columns`
    differentiate: Callable[..., Any]
    columns: tuple[str, ...]  # arguments that may be columns of a projection


FEATURES = Step(op.Arguments, 5, 1, op.compute, op.differentiate, ("x",))
GATES = Step(gate_op.Arguments, 5, 2, gate_op.compute, gate_op.differentiate, ("a", "b"))


def fits(streams: Sequence[FeatureStream], gates: GateInputs | None) -> bool:
    """Return whether one node can serve all: they are differentiated, and without states."""
    tensors = [x for stream in streams for x in (stream.x, stream.weight, stream.bias)]
    return (
        plain(tensors if gates is None else [*tensors, *gates.tensors])
        and all(
            stream.differentiated and not op.nothing(stream) and stream.history is None and not stream.return_history
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
    columns = [stream.x for stream in streams]
    if gates is not None:
        gates = gates.multiplied()
        steps, calls = [*steps, GATES], [*calls, gate_op.arguments(gates)]
        columns += [gates.a] if gates.b is None else [gates.a, gates.b]
    passing = list(others) if _complete([*columns, *others]) else []
    tensors = [x for step, call in zip(steps, calls, strict=True) for x in call[: step.tensors]]
    options = [call[step.tensors :] for step, call in zip(steps, calls, strict=True)]
    results = _Joint.apply(steps, options, is_deterministic(), *tensors, *passing)
    made = zip(results, streams, features, strict=False)
    outputs: list[tuple[Tensor, Tensor | None]] = [
        (op.recomputed(y, args, stream.kept), None) for y, stream, args in made
    ]
    after = len(streams)
    both = None if gates is None else (results[after], results[after + 1])
    return outputs, both, list(results[len(results) - len(passing) :]) if passing else list(others)


def _complete(columns: Sequence[Tensor]) -> bool:
    """Return whether tensors [B,T,…] are all columns of one tensor that needs a gradient."""
    memory, row = columns[0].untyped_storage().data_ptr(), columns[0].stride(1)
    return sum(math.prod(x.shape[2:]) for x in columns) == row and all(
        x.requires_grad and x.stride(1) == row and x.untyped_storage().data_ptr() == memory for x in columns
    )


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, steps: Sequence[Step], options: Sequence[Any], mode: bool, *tensors: Tensor | None
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.options, ctx.mode = steps, options, mode
        ctx.save_for_backward(*tensors)
        calls, passing = _calls(steps, options, tensors)
        outputs: list[Any] = []
        for step, args in zip(steps, calls, strict=True):
            outputs += in_mode(mode, step.compute, args)
        return *outputs, *passing

    @staticmethod
    def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        calls, passed = _calls(ctx.steps, ctx.options, ctx.saved_tensors)
        wanted, _ = _calls(ctx.steps, ctx.options, ctx.needs_input_grad[3:])
        columns = [getattr(args, name) for step, args in zip(ctx.steps, calls, strict=True) for name in step.columns]
        memory, arriving = iter(gradients_like([*columns, *passed])), iter(gradients)
        returned: list[Tensor | None] = []
        for step, args, want in zip(ctx.steps, calls, wanted, strict=True):
            incoming, own = [*islice(arriving, step.results)], [*islice(memory, len(step.columns))]
            if all(g is None for g in incoming):
                by_name = {name: x.zero_() for name, x in zip(step.columns, own, strict=True)}
            else:
                by_name = in_mode(ctx.mode, step.differentiate, args, want, *incoming, *own)
            names = args._fields[: step.tensors]
            returned += [by_name.get(name) if want[i] else None for i, name in enumerate(names)]
        for place, g in zip(memory, arriving, strict=True):
            if g is None:
                place.zero_()
            else:
                copy_rows(g.flatten(2), place.flatten(2))
            returned.append(place)
        return None, None, None, *returned

    backward = staticmethod(once(_differentiate))


def _calls(steps: Sequence[Step], options: Sequence[Any], tensors: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """The arguments of each step, and the tensors that are left."""
    calls, at = [], 0
    for step, rest in zip(steps, options, strict=True):
        calls.append(step.make(*tensors[at : at + step.tensors], *rest))
        at += step.tensors
    return calls, tensors[at:]
