"""Split a tensor by columns, so that the gradients of the parts are written side by side into one tensor.

A fused projection is split into the inputs of several ops. Each op computes the gradient of its columns, and autograd
would then copy all of these into one tensor. Here the first op that computes such a gradient allocates that tensor,
and each op writes to its columns of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import plain

# nodes that change nothing but the shape: a gradient passes through them unchanged
VIEWS = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0")


class _Whole:
    """The gradient of all columns, in one backward pass."""

    def __init__(self, key: tuple[int, int], gradient: Tensor, sizes: list[int]):
        self.key, self.gradient, self.places = key, gradient, gradient.split(sizes, -1)
        self.free = set(range(len(sizes)))

    def take(self, i: int) -> Tensor | None:
        """The memory of part i; None the second time, because autograd adds a second gradient to the first."""
        if i not in self.free:
            return None
        self.free.remove(i)
        return self.places[i]

    def complete(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The whole gradient; None if a part was handed out but its gradient lies elsewhere: others may read it."""
        missing = [i for i, (g, place) in enumerate(zip(gradients, self.places, strict=True)) if not _same(g, place)]
        if not self.free.issuperset(missing):
            return None
        for i in missing:
            g = gradients[i]
            self.places[i].zero_() if g is None else self.places[i].copy_(g)
        return self.gradient


def _same(x: Tensor | None, place: Tensor) -> bool:
    """Return whether x is exactly that memory, which `place` keeps allocated, so that comparing addresses is safe."""
    if x is None or x.data_ptr() != place.data_ptr() or (x.shape, x.dtype) != (place.shape, place.dtype):
        return False
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), place.stride(), strict=True))


def _key(device: torch.device) -> tuple[int, int]:
    """Identify this backward pass (a graph may run several, even concurrently) and the stream of the writes.

    No public function tells passes apart; `torch.utils.checkpoint` uses the same private one.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return torch._C._current_graph_task_id(), stream


class _Split(torch.autograd.Function):
    """Split x. The record of its gradient is stored on the node that will receive it, and dropped with that node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sizes, ctx.whole = x.shape, sizes, None
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        record, ctx.whole = ctx.whole, None
        like = next((g for g in gradients if g is not None), None)
        if like is None:
            return None, None
        # a gradient that will itself be differentiated must not be written in place
        if record is not None and record.key == _key(like.device) and not torch.is_grad_enabled():
            gradient = record.complete(gradients)
            if gradient is not None:
                return gradient, None
        every = zip(gradients, ctx.sizes, strict=True)
        return torch.cat([like.new_zeros(*ctx.shape[:-1], n) if g is None else g for g, n in every], -1), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> tuple[Tensor, ...]:
        return dx.split(ctx.sizes, -1)


def split_columns(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, -1), for parts whose gradients are written to the memory that `gradient_for` returns.

    Args:
        x: Any shape […,C].
        sizes: Sizes of the parts, which add up to C.

    Returns:
        Views […,size] of x. Their gradients are the same whichever op computes them, in that memory or elsewhere.
    """
    ours = plain((x,)) and x.requires_grad and torch.is_grad_enabled() and x.is_contiguous() and x.numel()
    if ours and not torch._C._are_functorch_transforms_active():
        return _Split.apply(x, list(sizes))
    return x.split(list(sizes), -1)


def gradient_for(x: Tensor, new: Callable[..., Tensor]) -> Tensor:
    """Memory for the gradient of x, which only the backward pass that calls this may write.

    Args:
        x: An input of the op, as saved for backward.
        new: `new(x, *shape)` allocates a tensor.

    Returns:
        An uninitialised tensor of the shape and dtype of x. It is contiguous unless x is a reshaped part of
        `split_columns`: then its last axis is contiguous, and the others may have gaps.
    """
    # The node of x decides, not its memory, which a checkpoint may have replaced.
    node: Any = x.grad_fn
    i = x.output_nr
    while node is not None and node.name() in VIEWS:
        node, i = node.next_functions[0]
    ours = type(x) is Tensor and isinstance(node, _Split._backward_cls)
    if ours:
        key, record = _key(x.device), node.whole
        if record is None or record.key != key:
            record = node.whole = _Whole(key, new(x, *node.shape), node.sizes)
        if (place := record.take(i)) is not None:
            return place.view(x.shape)
    return new(x, *x.shape)
