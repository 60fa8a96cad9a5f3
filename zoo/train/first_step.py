"""The kernels of the first step, compiled side by side."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn


def compile_ahead(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Compile the Triton kernels of a training step in threads, on a GPU; elsewhere do nothing.

    A kernel is otherwise compiled where it is launched first, one after another. Here a forward and a backward pass,
    in which no Triton kernel runs, finds out which ones there are. What it computes is undefined, and dropped; random
    numbers are drawn as if it had not been there.

    Args:
        model: The model, whole on one device.
        loss: Computes the loss of a training step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or parameters[0].device.type != "cuda" or find_spec("triton") is None:
        return
    from kernels.gpu.launch import compiling_ahead  # not every platform has Triton

    with torch.random.fork_rng([parameters[0].device]), compiling_ahead():
        torch.autograd.grad(loss(), parameters, allow_unused=True)
