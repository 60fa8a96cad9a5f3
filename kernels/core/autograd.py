"""Ops with a hand-written backward pass, registered with `torch.library` and autograd.

`torch.compile` sees one node forward and one backward, never a graph break, and nothing of the launches inside. In
eager mode the same functions are called directly, without the dispatcher.

The mode of `deterministic` is a hidden last argument of every op, so that its backward pass, which runs in another
thread, and compiled code follow the mode of the call.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ..errors import UserError
from .deterministic import in_mode, is_deterministic

NAMESPACE = "token_mixer_zoo"
Gradients = Mapping[str, Tensor | None]


def over_rows(x: Tensor) -> Tensor:
    """The sum of x […,C] over all axes but the last, in new memory."""
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x.clone()


def register(
    name: str,
    forward: Callable[[Any], tuple[Tensor | None, ...]],
    backward: Callable[..., Gradients] | None,
    empty: Callable[[Any], tuple[Tensor | None, ...]],
    *,
    results: int = 1,
    saves_results: bool = False,
    unread: Callable[[Any], Sequence[str]] = lambda args: (),
) -> Callable[..., Any]:
    """Register an op and its gradient.

    The arguments of the op are one NamedTuple class, tensors first: the annotation of the only parameter of `forward`.
    Its fields (`Tensor`, `Tensor | None`, `int`, `float`, `bool` …) become the schema.

    Args:
        name: Name of the op; its gradient is `<name>_backward`.
        forward: `forward(args)` returns a tuple of fresh contiguous tensors; its annotation tells how many. None stands
            for a residual that is not kept.
        backward: `backward(args, needed, *gradients, *residuals)`. `needed` has for each argument whether its gradient
            is needed (`needed.x`); the gradients are those of the results (None for a result without one, but never
            for all), the residuals are the outputs of `forward` that are not results. It returns contiguous gradients
            by the name of the argument, each of its shape and dtype; several may be parts of one tensor. An argument
            left out has none. `backward` itself is None if the op has no gradient. A residual that was not kept is
            None, or an empty tensor if the call went through PyTorch's dispatcher.
        empty: `empty(args)` returns uninitialised tensors of the shapes and dtypes that `forward` returns, and None
            where `forward` does.
        results: How many of the outputs are results. The others are residuals: saved for `backward`, and hidden from
            the caller.
        saves_results: Whether the results are saved as well, and passed to `backward` in front of the residuals.
        unread: Given the arguments of a call, the names of the tensors whose values `backward` does not read; their
            memory is not kept.

    Returns:
        A function of the fields, in order, that returns only the results, with gradients: a tensor, or a tuple.
    """
    hints = get_type_hints(forward)
    returns = hints.pop("return")
    if hasattr(returns, "_fields"):  # a NamedTuple
        returns = tuple[(Tensor,) * len(returns._fields)]  # type: ignore[misc]
    (make,) = hints.values()
    fields = get_type_hints(make)

    def run(*values: Any) -> tuple[Any, ...]:
        return in_mode(values[-1], forward, make(*values[:-1]))

    def dispatched(*values: Any) -> tuple[Tensor, ...]:
        return _without_none(run(*values))

    def fake(*values: Any) -> tuple[Tensor, ...]:
        return _without_none(in_mode(values[-1], empty, make(*values[:-1])))

    kinds_of_values = {**fields, "deterministic": bool}.items()
    parameters = [Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for field, kind in kinds_of_values]
    dispatched.__signature__ = Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(dispatched, mutates_args=())
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", dispatched, mutates_args=(), schema=schema)
    op.register_fake(fake)

    def returned_by(output: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return output[0] if results == 1 else output[:results]

    if backward is None:
        return lambda *values: returned_by((run if plain(values) else op)(*values, is_deterministic()))
    differentiate = backward
    arguments, outputs = schema[1:].split(") -> (")
    kinds = [argument.startswith("Tensor") for argument in arguments.split(", ")]
    count = sum(kinds)  # number of tensor arguments
    assert all(kinds[:count])
    tensors = tuple(fields)[:count]
    unsaved = 0 if saves_results else results
    saved_outputs = len(outputs.split(",")) - unsaved
    first = results + saved_outputs  # index of `needed`: gradients and residuals come before it, arguments after it
    inputs = [f"Tensor? gradient{i}" for i in range(results)] + [f"Tensor kept{i}" for i in range(saved_outputs)]
    # in schemas, a tuple of one is written with brackets
    returned = "(Tensor)" if count == 1 else ", ".join(["Tensor"] * count)
    signature = f"({', '.join([*inputs, 'bool[] needed', arguments])}) -> ({returned})"

    def derive(*values: Any) -> list[Tensor | None]:
        """The needed gradients in the order of the tensors, from gradients, residuals, `needed` and arguments."""
        needed, args = values[first], make(*values[first + 1 : -1])
        by_name: Gradients = {}
        if any(g is not None for g in values[:results]):
            by_name = in_mode(values[-1], differentiate, args, make(*needed[:-1]), *values[:first])
        return [by_name.get(field) if want else None for field, want in zip(tensors, needed, strict=False)]

    def run_backward(*values: Any) -> tuple[Tensor, ...]:
        every = _without_none(derive(*values), like=values[first + 1])
        # nor may two results share memory
        memory = [g.untyped_storage().data_ptr() for g in every]
        return tuple(g.clone() if memory[i] in memory[:i] else g for i, g in enumerate(every))

    def fake_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *args = values[first:]
        return tuple(
            args[0].new_empty(0) if x is None or not want else x.new_empty(x.shape)
            for x, want in zip(args[:count], needed, strict=False)
        )

    gradient = torch.library.custom_op(f"{NAMESPACE}::{name}_backward", run_backward, mutates_args=(), schema=signature)
    gradient.register_fake(fake_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.set_materialize_grads(False)
        saved = list(inputs[:count])
        for field in unread(make(*inputs[:-1])):
            i = tensors.index(field)
            saved[i] = inputs[i].new_empty_strided(inputs[i].shape, [0] * inputs[i].dim())  # one element
        ctx.save_for_backward(*saved, *output[unsaved:])
        ctx.options = inputs[count:]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[results:])
        keep(ctx, inputs, output)

    def differentiated(run: Callable[..., Sequence[Tensor | None]], ctx: Any, *gradients: Tensor | None) -> Any:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[: len(kinds)]
        input_gradients = run(*gradients[:results], *saved[count:], needed, *saved[:count], *ctx.options)
        wanted = zip(input_gradients, needed[:count], strict=True)
        return (*[g if want else None for g, want in wanted], *[None] * len(ctx.options))

    op.register_autograd(partial(differentiated, gradient), setup_context=setup_context)

    class Direct(torch.autograd.Function):
        """The op without PyTorch's dispatcher, which takes as long as some kernels."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            output = run(*args)
            if any(ctx.needs_input_grad):
                keep(ctx, args, output)
            return output[:results]

        backward = staticmethod(once(partial(differentiated, derive)))

    def call(*args: Any) -> Tensor | tuple[Tensor, ...]:
        return returned_by((Direct.apply if plain(args) else op)(*args, is_deterministic()))

    return call


def _without_none(outputs: Sequence[Tensor | None], like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the outputs of an op with an empty tensor in place of None, as a schema has no optional results.

    Args:
        outputs: The outputs.
        like: A tensor with the dtype and the device of the empty ones; by default the first output.
    """
    like = outputs[0] if like is None else like
    assert like is not None
    return tuple(like.new_empty(0) if x is None else x for x in outputs)


class _Gradients(torch.autograd.Function):
    """Gradients that depend on further tensors, a dependence which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise UserError("gradients of this op cannot be differentiated again, except those of backend('reference')")


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass whose gradients raise a UserError when they are differentiated themselves.

    PyTorch's `once_differentiable` leaves out what depends on saved tensors: a second gradient would be 0 silently.
    """

    def run(ctx: Any, *incoming: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        with torch.no_grad():
            returned = backward(ctx, *incoming)
        gradients = list(returned) if isinstance(returned, tuple) else [returned]
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sources = [x for x in (*incoming, *ctx.saved_tensors) if x is not None and x.requires_grad]
        if places:
            guarded = _Gradients.apply(len(places), *(gradients[i].detach() for i in places), *sources)
            for i, gradient in zip(places, guarded, strict=True):
                gradients[i] = gradient
        return tuple(gradients)

    return run


# types that need no subclass check
KNOWN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, str, int, float, bool, type(None)})


def plain(values: Sequence[Any]) -> bool:
    """Return whether all tensors are ordinary ones that hold data, and nothing is being compiled or traced."""
    return not torch.compiler.is_compiling() and not any(issubclass(x, Tensor) for x in {*map(type, values)} - KNOWN)
