"""Ops with a hand-written backward pass, registered with `torch.library` and autograd.

`torch.compile` sees one node forward and one backward, never a graph break, and nothing of the launches inside. In
eager mode the same functions are called directly, without the dispatcher.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NAMESPACE = "token_mixer_zoo"
Forward = Callable[..., tuple[Tensor, ...]]
Backward = Callable[..., Sequence[Tensor | None]]


def register(
    name: str,
    forward: Forward,
    backward: Backward | None,
    fake: Forward,
    *,
    results: int,
    unread: Callable[..., Sequence[int]] = lambda *args: (),
) -> Forward:
    """Register an op and its gradient.

    Args:
        name: Name of the op; its gradient is `<name>_backward`.
        forward: Function of positional arguments, tensors first, annotated with `Tensor`, `Tensor | None`, `int`,
            `float`, `bool` …; the annotations become the schema. It returns a tuple of fresh contiguous tensors.
        backward: `backward(gradients, residuals, needed, *arguments)`. It receives the gradients of the results (None
            for a result without one), the outputs of `forward` that are not results, and for each argument whether its
            gradient is needed. It returns, for each *tensor* argument, None or a gradient of its shape and dtype,
            contiguous unless `gradient_for` (`columns.py`) allocated it; several may be parts of one tensor. None if
            the op has no gradient.
        fake: `forward` for fake tensors: it returns empty tensors of the right shapes and dtypes.
        results: How many of the outputs are results. The others are residuals: saved for `backward`, and hidden from
            the caller.
        unread: Given the arguments of a call, the indices of the tensors whose values `backward` does not read; their
            memory is not kept.

    Returns:
        A function like `forward` that returns only the results, with gradients.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", forward, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is None:
        return lambda *args: (forward if plain(args) else op)(*args)[:results]
    derive: Backward = backward
    arguments, outputs = schema[1:].split(") -> (")
    kinds = [argument.startswith("Tensor") for argument in arguments.split(", ")]
    count = sum(kinds)  # number of tensor arguments
    assert all(kinds[:count])
    first = len(outputs.split(","))  # index of `needed`: gradients and residuals come before it, arguments after it
    inputs = [f"Tensor? gradient{i}" for i in range(results)] + [f"Tensor kept{i}" for i in range(first - results)]
    # in schemas, a tuple of one is written with brackets
    returns = "(Tensor)" if count == 1 else ", ".join(["Tensor"] * count)
    signature = f"({', '.join([*inputs, 'bool[] needed', arguments])}) -> ({returns})"

    def run_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *args = values[first:]
        input_gradients = derive(values[:results], values[results:first], needed, *args)
        wanted = zip(input_gradients, needed[:count], strict=True)
        # a schema has no optional results: an empty tensor represents None
        every = [g if g is not None and want else args[0].new_empty(0) for g, want in wanted]
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
        for i in unread(*inputs):
            saved[i] = inputs[i].new_empty(1).expand(inputs[i].shape)
        ctx.save_for_backward(*saved, *output[results:])
        ctx.options = inputs[count:]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[results:])
        keep(ctx, inputs, output)

    def differentiate(run: Backward, ctx: Any, *gradients: Tensor | None) -> Any:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[: len(kinds)]
        input_gradients = run(gradients[:results], saved[count:], needed, *saved[:count], *ctx.options)
        wanted = zip(input_gradients, needed[:count], strict=True)
        return (*[g if want else None for g, want in wanted], *[None] * len(ctx.options))

    def dispatched(
        gradients: Sequence[Tensor | None], residuals: Sequence[Tensor], *rest: Any
    ) -> Sequence[Tensor | None]:
        return gradient(*gradients, *residuals, *rest)

    op.register_autograd(partial(differentiate, dispatched), setup_context=setup_context)

    class Direct(torch.autograd.Function):
        """The op without PyTorch's dispatcher, which takes as long as some kernels."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            output = forward(*args)
            keep(ctx, args, output)
            return output[:results]

        backward = staticmethod(once(partial(differentiate, derive)))

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
