"""The norms of the mixers' recurrent states: one number for each part of each layer's state."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from kernels.errors import UserError
from mixers import remembered
from zoo.data.batch import Batch
from zoo.train.callbacks.run_callback import RunCallback


class StateNorms(RunCallback):
    """Logs the Frobenius norms of the states after the first row of a validation, for instance `state_norm_3_matrix`.

    The row is the same each time (the first document, if documents are packed), so changes are due to the model alone.
    A state that grows with the text, such as keys and values, is that of the whole row.

    Args:
        every_n_validations: Measure at every N-th validation, starting with the first; null never measures.

    Raises:
        UserError: `every_n_validations` is below 1.
    """

    key = "state_norms"
    order = 150

    def __init__(self, every_n_validations: int | None = None) -> None:
        if every_n_validations is not None and every_n_validations < 1:
            raise UserError(f"state_norms.every_n_validations is {every_n_validations}; it must be 1 or more, or null.")
        self.every = every_n_validations
        self._validations = 0

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run the row once more, with states, in all processes (a sharded model needs all of them)."""
        if self.every is None or trainer.state.fn != "fit" or trainer.sanity_checking or batch_idx or dataloader_idx:
            return
        self._validations += 1
        if (self._validations - 1) % self.every:
            return
        tokens = batch.tokens[:1]
        if batch.cu_seqlens is not None:
            lengths = batch.cu_seqlens.diff().tolist()
            start = next(i for i, length in enumerate(lengths) if length)
            tokens = tokens[:, sum(lengths[:start]) :][:, : lengths[start]]
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            _, state = pl_module.model(tokens, pl_module.model.init_state(1, pl_module.device))
        for name, norm in state_norms(state).items():
            self.log(f"state_norm_{name}", norm, batch_size=1, add_dataloader_idx=False)


def state_norms(state: tuple[Any, ...]) -> dict[str, Tensor]:
    """Frobenius norms of a model's state: `LAYER_PART` → the norm over all sequences and heads, a scalar in fp32.

    The key is LAYER alone if the state of a layer is one tensor.
    """
    return {
        f"{layer}{name}": leaf.float().norm()
        for layer, layer_state in enumerate(state)
        for name, leaf in remembered(layer_state)
    }
