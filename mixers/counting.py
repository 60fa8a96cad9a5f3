"""Counting FLOPs by PyTorch's counter, also of mixers that do not say how many they need."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels


def counted_flops(run: Callable[[], object]) -> int:
    """The FLOPs of matrix products and convolutions in a call, with attention in its plain form."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which takes a tenth of PyTorch's time

    # PyTorch's table lacks the triangular solve
    mapping = {torch.ops.aten.linalg_solve_triangular: _solve_flops}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), kernels.backend("torch"), counter:
        run()
    return counter.get_total_flops()


def on_meta(module: nn.Module, x: Tensor) -> Any:
    """The result of a module without its memory and its time: shapes alone."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        return functional_call(module, {name: tensor.to("meta") for name, tensor in tensors.items()}, (x,))


def _solve_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Half of a matrix product, since each row meets only the rows above it. Arguments are shapes."""
    *batch, rows, columns = b
    return int(torch.Size(batch).numel()) * rows * rows * columns
