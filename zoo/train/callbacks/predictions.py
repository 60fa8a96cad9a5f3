"""The output file of `predict`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from kernels import UserError
from zoo.files.links import open_in_place


class Predictions(BasePredictionWriter):
    """Writes the negative log-likelihood of each token in nats: one JSON line per row of a batch, null if unlabelled.

    Args:
        path: The output file, which must not exist yet.

    Raises:
        UserError: The file exists, or its folder is not writable.
    """

    def __init__(self, path: str | Path):
        super().__init__("batch")
        self.path = Path(path)
        if os.path.lexists(self.path):
            raise UserError(f"output: {self.path} exists already; choose another file")
        if not self.path.parent.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise UserError(f"output: the folder {self.path.parent} does not exist or cannot be written to")

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say where the losses are."""
        pl_module.print(f"{self.path}: the loss of every token in nats, one line a sequence")

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Tensor,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: Literal[0] | int,
    ) -> None:
        with open_in_place(self.path, "a") as file:
            for tokens, losses in zip(batch.tokens.tolist(), prediction.tolist(), strict=True):
                losses = [None if loss != loss else round(loss, 6) for loss in losses]
                row = {"loader": dataloader_idx, "batch": batch_idx, "tokens": tokens, "losses": losses}
                file.write(json.dumps(row) + "\n")
