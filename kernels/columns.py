"""Columns of one tensor, whose gradients are written side by side where they are made.

A fused projection is cut into the inputs of several ops. Each of them makes the gradient of its own columns, and
autograd then copies all of them into one tensor. Here the first op that makes such a gradient allocates that tensor,
and each gets its columns of it to write to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .op import plain

# the gradient passes them as it is: they change nothing but the shape
VIEWS = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0")


class _Whole:
    """The gradient of all columns, in one backward pass."""

    def __init__(self, key: tuple[int, int], gradient: Tensor, sizes: list[int]):
        self.key, self.gradient, self.places = key, gradient, gradient.split(sizes, -1)
        self.free = set(range(len(sizes)))

    def take(self, i: int) -> Tensor | None:
        """The columns i: once, as a second gradient of them is added to the first."""
        if i not in self.free:
            return None
        self.free.remove(i)
        return self.places[i]

    def complete(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """All columns. None if the gradient of some that were taken lies elsewhere: another may read what is there."""
        missing = [i for i, (g, place) in enumerate(zip(gradients, self.places, strict=True)) if not _same(g, place)]
        if not self.free.issuperset(missing):
            return None
        for i in missing:
            g = gradients[i]
            self.places[i].zero_() if g is None else self.places[i].copy_(g)
        return self.gradient


def _same(x: Tensor | None, place: Tensor) -> bool:
    """Whether x is that place in memory, which is not free while it is asked for."""
    if x is None or x.data_ptr() != place.data_ptr() or (x.shape, x.dtype) != (place.shape, place.dtype):
        return False
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), place.stride(), strict=True))


def _key(device: torch.device) -> tuple[int, int]:
    """This backward pass (the same graph may see several, even at once), and the stream that what is written waits in.

    No public function tells passes apart; `torch.utils.checkpoint` asks for the same number.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return torch._C._current_graph_task_id(), stream


class _Split(torch.autograd.Function):
    """The record of a gradient hangs on the node that will receive it: it lives no longer, and is never another's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sizes, ctx.whole = x.shape, sizes, None
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        whole, ctx.whole = ctx.whole, None
        like = next((g for g in gradients if g is not None), None)
        if like is None:
            return None, None
        # a gradient that is differentiated itself is no place to write to
        if whole is not None and whole.key == _key(like.device) and not torch.is_grad_enabled():
            found = whole.complete(gradients)
            if found is not None:
                return found, None
        every = zip(gradients, ctx.sizes, strict=True)
        return torch.cat([like.new_zeros(*ctx.shape[:-1], n) if g is None else g for g, n in every], -1), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> tuple[Tensor, ...]:
        return dx.split(ctx.sizes, -1)


def split_columns(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, -1), for parts whose users make their gradients in the place that `gradient_for` gives them.

    Args:
        x: Any shape […,C].
        sizes: Sizes of the parts, C together.

    Returns:
        Views […,size] of x. Their gradients are the same whoever made them, and whether in their place or not.
    """
    ours = plain((x,)) and x.requires_grad and torch.is_grad_enabled() and x.is_contiguous() and x.numel()
    if ours and not torch._C._are_functorch_transforms_active():
        return _Split.apply(x, list(sizes))
    return x.split(list(sizes), -1)


def gradient_for(x: Tensor, new: Callable[..., Tensor]) -> Tensor:
    """Where the backward pass of an op, and nobody else, is to write the gradient of x; to be asked within that pass.

    Args:
        x: An input of the op, as it was kept.
        new: new(x, *shape) allocates a tensor.

    Returns:
        A tensor of the shape and dtype of x without content. It is contiguous unless x is a reshaped part of
        `split_columns`: then its last axis is, and the others may have gaps.
    """
    # Whatever became of the memory of x, as in a checkpoint: its gradient goes to its node.
    node: Any = x.grad_fn
    i = x.output_nr
    while node is not None and node.name() in VIEWS:
        node, i = node.next_functions[0]
    ours = type(x) is Tensor and isinstance(node, _Split._backward_cls)
    if ours:
        key, whole = _key(x.device), node.whole
        if whole is None or whole.key != key:
            whole = node.whole = _Whole(key, new(x, *node.shape), node.sizes)
        if (place := whole.take(i)) is not None:
            return place.view(x.shape)
    return new(x, *x.shape)
