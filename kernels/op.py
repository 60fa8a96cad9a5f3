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
            `bool` …, that returns a tuple of fresh contiguous tensors. The annotations become the schema.
        backward: `backward(gradients, residuals, needed, *arguments)`: the gradients of the results (None where none
            arrives), the outputs of `forward` that are no results, and for each argument whether its gradient is
            wanted. It returns, for each *tensor* argument, a gradient of its shape and dtype, contiguous unless
            `gradient_for` (`columns.py`) gave it a place, or None. None if the op has no gradient.
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
    first = len(outputs.split(","))  # before it the gradient takes gradients and kept outputs, from it on the arguments
    given_first = [f"Tensor? gradient{i}" for i in range(results)] + [f"Tensor kept{i}" for i in range(first - results)]
    signature = f"({', '.join([*given_first, 'bool[] needed', arguments])}) -> ({', '.join(['Tensor'] * sum(kinds))})"

    def tensors(x: Sequence[Any]) -> list[Any]:
        return [value for value, is_tensor in zip(x, kinds, strict=True) if is_tensor]

    def run_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *given = values[first:]
        found = derive(values[:results], values[results:first], needed, *given)
        wanted = zip(found, tensors(needed), strict=True)
        # a schema has no optional results: nothing is an empty tensor
        return tuple(g if g is not None and want else tensors(given)[0].new_empty(0) for g, want in wanted)

    def fake_backward(*values: Any) -> tuple[Tensor, ...]:
        needed, *given = values[first:]
        wanted = list(zip(tensors(given), tensors(needed), strict=True))
        return tuple(
            x.new_empty(x.shape) if x is not None and want else wanted[0][0].new_empty(0) for x, want in wanted
        )

    gradient = torch.library.custom_op(f"{NAMESPACE}::{name}_backward", run_backward, mutates_args=(), schema=signature)
    gradient.register_fake(fake_backward)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[results:])
        kept = list(inputs)
        for i in unread(*inputs):
            kept[i] = inputs[i].new_empty(1).expand(inputs[i].shape)
        ctx.save_for_backward(*tensors(kept), *output[results:])
        ctx.options = [x for x, is_tensor in zip(inputs, kinds, strict=True) if not is_tensor]

    def differentiate(run: Backward, ctx: Any, *gradients: Tensor | None) -> Any:
        saved, options = iter(ctx.saved_tensors), iter(ctx.options)
        given = [next(saved) if is_tensor else next(options) for is_tensor in kinds]
        needed = [n and x is not None for n, x in zip(ctx.needs_input_grad, given, strict=False)]
        found = iter(run(gradients[:results], list(saved), needed, *given))
        every = [next(found) if is_tensor else None for is_tensor in kinds]
        return tuple(g if want else None for g, want in zip(every, needed, strict=True))

    def dispatched(gradients: Sequence[Tensor | None], kept: Sequence[Tensor], *rest: Any) -> Sequence[Tensor | None]:
        return gradient(*gradients, *kept, *rest)

    op.register_autograd(partial(differentiate, dispatched), setup_context=setup_context)

    class Direct(torch.autograd.Function):
        """The same past the dispatcher, which takes as long as some kernels."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
            output = forward(*given)
            setup_context(ctx, given, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return differentiate(derive, ctx, *gradients)

    return lambda *given: (Direct.apply if plain(given) else op)(*given)[:results]


def plain(given: Sequence[Any]) -> bool:
    """Whether these are tensors with numbers in them, and nobody compiles or traces what happens to them."""
    return not torch.compiler.is_compiling() and all(
        type(x) in (Tensor, torch.nn.Parameter) for x in given if isinstance(x, Tensor)
    )
