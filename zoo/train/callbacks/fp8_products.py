"""`fp8: true`: the large matrix products of the blocks in FP8, for the training steps."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning as L
from torch import nn

import kernels
from kernels import UserError
from kernels.linear.fp8 import check_device
from zoo.train.callbacks.training_forward import Forward, TrainingForward

PRECISIONS = ("bf16-mixed", "bf16-true")


class FP8Products(TrainingForward):
    """Runs the blocks of the model inside `kernels.fp8()` during training steps.

    Embeddings, the head and everything after the last block are outside. Validation, sampling and checkpoints do not
    depend on it, and a run may be continued with or without.
    """

    order = 85  # inside activation checkpointing, which computes the products again

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check what can be checked before the first step.

        Raises:
            UserError: The device has no FP8, the precision is not one of bf16, or no linear map is large enough.
        """
        check_device(pl_module.device)
        if (precision := trainer.precision_plugin.precision) not in PRECISIONS:
            raise UserError(f"fp8: true needs trainer.precision {' or '.join(PRECISIONS)}, not {precision}")
        blocks: Any = pl_module.model.layers
        with kernels.fp8():
            maps = [part for part in blocks.modules() if isinstance(part, nn.Linear)]
            if not any(kernels.in_fp8(part.in_features, part.out_features) for part in maps):
                raise UserError("fp8: true has no effect on this model, whose blocks have no large linear map")

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """All blocks, inside `kernels.fp8()`."""
        return [(block, partial(_in_fp8, block.forward)) for block in model.layers]


def _in_fp8(forward: Forward, *inputs: Any) -> Any:
    with kernels.fp8():
        return forward(*inputs)
