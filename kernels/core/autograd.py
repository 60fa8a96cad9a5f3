"""Ops with a hand-written backward pass, registered with `torch.library` and autograd.

`torch.compile` sees one node forward and one backward, never a graph break, and nothing of the launches inside. In
eager mode the same functions are called directly, without the dispatcher.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NAMESPACE = "token_mixer_zoo"
Forward = Callable[[Any], tuple[Tensor, ...]]
Gradients = Mapping[str, Tensor | None]
Backward = Callable[[Sequence[Tensor | None], Sequence[Tensor], Any, Any], Gradients]


def register(
    name: str,
    forward: Forward,
    backward: Backward | None,
    fake: Forward,
    *,
    results: int = 1,
    unread: Callable[[Any], Sequence[str]] = lambda args: (),
) -> Callable[..., tuple[Tensor, ...]]:
    """Register an op and its gradient.

    The arguments of the op are one NamedTuple class, tensors first: the annotation of the only parameter of `forward`.
    Its fields (`Tensor`, `Tensor | None`, `int`, `float`, `bool` …) become the schema.

    Args:
        name: Name of the op; its gradient is `<name>_backward`.
        forward: `forward(args)` returns a tuple of fresh contiguous tensors; its annotation tells how many.
        backward: `backward(gradients, residuals, needed, args)`. It receives the gradients of the results (None for a
            result without one), the outputs of `forward` that are not results, for each argument whether its gradient
            is needed (`needed.x`), and the arguments. It returns contiguous gradients by the name of the argument,
            each of its shape and dtype; several may be parts of one tensor. An argument left out has none. None if the
            op has no gradient.
        fake: `forward` for fake tensors: it returns empty tensors of the right shapes and dtypes.
        results: How many of the outputs are results. The others are residuals: saved for `backward`, and hidden from
            the caller.
        unread: Given the arguments of a call, the names of the tensors whose values `backward` does not read; their
            memory is not kept.

    Returns:
        A function of the fields, in order, that returns only the results, with gradients.
    """
    hints = get_type_hints(forward)
    returns = hints.pop("return")
    if hasattr(returns, "_fields"):  # a NamedTuple
        returns = tuple[tuple(get_type_hints(returns).values())]  # type: ignore[misc]
    (make,) = hints.values()
    fields = get_type_hints(make)
    names = tuple(fields)

    def run(*values: Any) -> tuple[Tensor, ...]:
        return tuple(forward(make(*values)))

    parameters = [Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for field, kind in fields.items()]
    run.__signature__ = Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(run, mutates_args=())
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(lambda *values: tuple(fake(make(*values))))
    if backward is None:
        return lambda *values: (run if plain(values) else op)(*values)[:results]
    differentiate: Backward = backward
    arguments, outputs = schema[1:].split(") -> (")
    kinds = [argument.startswith("Tensor") for argument in arguments.split(", ")]
    count = sum(kinds)  # number of tensor arguments
    assert all(kinds[:count])
    tensors = names[:count]
    first = len(outputs.split(","))  # index of `needed`: gradients and residuals come before it, arguments after it
    inputs = [f"Tensor? gradient{i}" for i in range(results)] + [f"Tensor kept{i}" for i in range(first - results)]
    # in schemas, a tuple of one is written with brackets
    returned = "(Tensor)" if count == 1 else ", ".join(["Tensor"] * count)
    signature = f"({', '.join([*inputs, 'bool[] needed', arguments])}) -> ({returned})"

    def derive(
        gradients: Sequence[Tensor | None], residuals: Sequence[Tensor], needed: Sequence[bool], *values: Any
    ) -> list[Tensor | None]:
        """The needed gradients, in the order of the tensor arguments."""
        by_name = differentiate(gradients, residuals, make(*needed), make(*values))
        return [by_name.get(field) if want else None for field, want in zip(tensors, needed, strict=False)]

    def run_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *args = values[first:]
        # a schema has no optional results: an empty tensor represents None
        every = [
            args[0].new_empty(0) if g is None else g
            for g in derive(values[:results], values[results:first], needed, *args)
        ]
        # nor may two results share memory
        memory = [g.untyped_storage().data_ptr() for g in every]
        return tuple(g.clone() if memory[i] in memory[:i] else g for i, g in enumerate(every))

    def fake_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *args = values[first:]
        wanted = list(zip(args[:count], needed[:count], strict=True))
        return tuple(
            x.new_empty(x.shape) if x is not None and want else wanted[0][0].new_empty(0) for x, want in wanted
        )

    gradient = torch.library.custom_op(f"{NAMESPACE}::{name}_backward", run_backward, mutates_args=(), schema=signature)
    gradient.register_fake(fake_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        saved = list(inputs[:count])
        for field in unread(make(*inputs)):
            i = tensors.index(field)
            saved[i] = inputs[i].new_empty(1).expand(inputs[i].shape)
        ctx.save_for_backward(*saved, *output[results:])
        ctx.options = inputs[count:]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[results:])
        keep(ctx, inputs, output)

    def differentiated(run: Callable[..., Sequence[Tensor | None]], ctx: Any, *gradients: Tensor | None) -> Any:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[: len(kinds)]
        input_gradients = run(gradients[:results], saved[count:], needed, *saved[:count], *ctx.options)
        wanted = zip(input_gradients, needed[:count], strict=True)
        return (*[g if want else None for g, want in wanted], *[None] * len(ctx.options))

    def dispatched(
        gradients: Sequence[Tensor | None], residuals: Sequence[Tensor], *rest: Any
    ) -> Sequence[Tensor | None]:
        return gradient(*gradients, *residuals, *rest)

    op.register_autograd(partial(differentiated, dispatched), setup_context=setup_context)

    class Direct(torch.autograd.Function):
        """The op without PyTorch's dispatcher, which takes as long as some kernels."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            output = run(*args)
            keep(ctx, args, output)
            return output[:results]

        backward = staticmethod(once(partial(differentiated, derive)))

    return lambda *args: Direct.apply(*args) if plain(args) else op(*args)[:results]


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, without the cost of its guard where gradients are not themselves differentiated."""
    guarded = once_differentiable(backward)

    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


# types that need no subclass check
KNOWN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, str, int, float, bool, type(None)})


def plain(values: Sequence[Any]) -> bool:
    """Return whether all tensors are ordinary ones that hold data, and nothing is being compiled or traced."""
    return not torch.compiler.is_compiling() and not any(issubclass(x, Tensor) for x in {*map(type, values)} - KNOWN)
