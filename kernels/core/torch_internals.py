"""PyTorch's private names (tried with PyTorch 2.11 to 2.13), which no other file may use."""

from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "TorchDispatchMode",
    "adjusted_rate",
    "copy_each",
    "orthogonalised",
    "saved_tensor_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

# parts of Muon's update; that of PyTorch reads the learning rate on the host
adjusted_rate, orthogonalised = _adjust_lr, _zeropower_via_newtonschulz


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each tensor into the target at its position, in few kernels."""
    torch._foreach_copy_(targets, sources)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the innermost pair of hooks on saved tensors; None outside of all hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
