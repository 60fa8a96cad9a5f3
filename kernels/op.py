"""The one place that spells autograd: an op with a hand-written backward, known to `torch.library`.

`torch.compile` then sees one node forward and one backward, never a graph break, and nothing of what they launch. Where
nothing is compiled, the same functions are called without the dispatcher in between.
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
    unread: Callable[..., Sequence[int]] = lambda *given: (),
) -> Forward:
    """Register an op and its gradient.

    Args:
        name: Of the op; its gradient is `<name>_backward`.
        forward: Plain function of positional arguments, annotated with `Tensor`, `Tensor | None`, `int`, `float`,
            `bool` …, the tensors first. It returns a tuple of fresh contiguous tensors. The annotations become the
            schema.
        backward: `backward(gradients, residuals, needed, *arguments)`: the gradients of the results (None where none
            arrives), the outputs of `forward` that are no results, and for each argument whether its gradient is
            wanted. It returns, for each *tensor* argument, a gradient of its shape and dtype, contiguous unless
            `gradient_for` (`columns.py`) gave it a place, or None; several may be parts of one tensor. None if the op
            has no gradient.
        fake: `forward` with empty tensors: shapes and dtypes only.
        results: How many of the outputs are results; the others are kept for `backward` and nobody else sees them.
        unread: Given the arguments of a call, which of them are tensors whose numbers `backward` does not read: their
            memory is not kept.

    Returns:
        A function like `forward` that returns the results only, with gradients.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", forward, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is None:
        return lambda *given: (forward if plain(given) else op)(*given)[:results]
    derive: Backward = backward
    arguments, outputs = schema[1:].split(") -> (")
    kinds = [argument.startswith("Tensor") for argument in arguments.split(", ")]
    count = sum(kinds)  # of tensors
    assert all(kinds[:count])
    first = len(outputs.split(","))  # before it the gradient takes gradients and kept outputs, from it on the arguments
    given_first = [f"Tensor? gradient{i}" for i in range(results)] + [f"Tensor kept{i}" for i in range(first - results)]
    signature = f"({', '.join([*given_first, 'bool[] needed', arguments])}) -> ({', '.join(['Tensor'] * count)})"

    def run_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *given = values[first:]
        found = derive(values[:results], values[results:first], needed, *given)
        wanted = zip(found, needed[:count], strict=True)
        # a schema has no optional results: nothing is an empty tensor
        every = [g if g is not None and want else given[0].new_empty(0) for g, want in wanted]
        # nor may two of them share memory
        memory = [g.untyped_storage().data_ptr() for g in every]
        return tuple(g.clone() if memory[i] in memory[:i] else g for i, g in enumerate(every))

    def fake_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *given = values[first:]
        wanted = list(zip(given[:count], needed[:count], strict=True))
        return tuple(
            x.new_empty(x.shape) if x is not None and want else wanted[0][0].new_empty(0) for x, want in wanted
        )

    gradient = torch.library.custom_op(f"{NAMESPACE}::{name}_backward", run_backward, mutates_args=(), schema=signature)
    gradient.register_fake(fake_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        kept = list(inputs[:count])
        for i in unread(*inputs):
            kept[i] = inputs[i].new_empty(1).expand(inputs[i].shape)
        ctx.save_for_backward(*kept, *output[results:])
        ctx.options = inputs[count:]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[results:])
        keep(ctx, inputs, output)

    def differentiate(run: Backward, ctx: Any, *gradients: Tensor | None) -> Any:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[: len(kinds)]
        found = run(gradients[:results], saved[count:], needed, *saved[:count], *ctx.options)
        wanted = zip(found, needed[:count], strict=True)
        return (*[g if want else None for g, want in wanted], *[None] * len(ctx.options))

    def dispatched(gradients: Sequence[Tensor | None], kept: Sequence[Tensor], *rest: Any) -> Sequence[Tensor | None]:
        return gradient(*gradients, *kept, *rest)

    op.register_autograd(partial(differentiate, dispatched), setup_context=setup_context)

    class Direct(torch.autograd.Function):
        """The same past the dispatcher, which takes as long as some kernels."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            output = forward(*given)
            keep(ctx, given, output)
            return output[:results]

        backward = staticmethod(once(partial(differentiate, derive)))

    return lambda *given: Direct.apply(*given) if plain(given) else op(*given)[:results]


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, without its guard where nobody differentiates the gradient."""
    guarded = once_differentiable(backward)

    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


# types that need no second look
KNOWN = frozenset({Tensor, torch.nn.Parameter, torch.dtype, str, int, float, bool, type(None)})


def plain(given: Sequence[Any]) -> bool:
    """Whether these are tensors with numbers in them, and nobody compiles or traces what happens to them."""
    return not torch.compiler.is_compiling() and not any(issubclass(x, Tensor) for x in {*map(type, given)} - KNOWN)
