"""`compile: true`: torch.compile for the training steps."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import nn

from kernels import UserError
from zoo.train.callbacks.run_callback import Forward, TrainingForward


def compiled_blocks(
    model: nn.Module, backend: str | Callable[..., Any] = "inductor"
) -> list[tuple[nn.Module, Forward]]:
    """Each block of a model with its forward function wrapped in torch.compile, which compiles at the first call.

    Args:
        model: A language model with `layers`.
        backend: Backend of torch.compile.
    """
    blocks: list[Any] = list(model.layers)  # type: ignore[arg-type]
    # code that depends on the depth, such as a constant decay, is compiled for each layer; the default limit is 8
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
    # with padding, Inductor of PyTorch 2.11 writes and reads a buffer of Mamba3's backward pass in two layouts on a GPU
    options: dict[str, Any] | None = {"comprehensive_padding": False} if backend == "inductor" else None
    # training batches have one shape; a graph for any length would be slower, and cannot split chunks
    return [(block, torch.compile(block.forward, dynamic=False, backend=backend, options=options)) for block in blocks]


class CompiledBlocks(TrainingForward):
    """Compiles each block of the model separately: similar blocks share code, so that the first step comes soon.

    Only training steps use the compiled blocks. Validation has other shapes and sampling has states, so both would be
    compiled again. Checkpoints do not depend on it.

    Args:
        backend: Backend of torch.compile.
    """

    order = 80

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self.backend = backend
        self._compiled: list[tuple[nn.Module, Forward]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wrap the blocks; they are compiled at the first step.

        Raises:
            UserError: PyTorch needs a C++ compiler on a CPU, and none is installed.
        """
        if self.backend == "inductor":
            if pl_module.device.type == "cpu":
                _check_compiler()
            pl_module.print("compiling the blocks, which makes the first step take minutes")
        self._compiled = compiled_blocks(pl_module.model, self.backend)

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """All blocks, compiled."""
        return self._compiled


def _check_compiler() -> None:
    """Raise a UserError unless PyTorch finds a C++ compiler; without one the first step would fail halfway."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise UserError(
            "compile: true needs a C++ compiler on a CPU; install g++, or name one by the environment variable CXX"
        ) from None
