"""FSDP2 as a strategy of this project: parameters, gradients and optimiser sharded by PyTorch, checkpoints in one file.

Tried with Lightning 2.6, whose `ModelParallelStrategy` looks the parameters of a checkpoint up by attribute names; a
fused projection saves its parts under names of their own.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


class FSDP2(ModelParallelStrategy):
    """Shards parameters, gradients and the optimiser over all processes, a block at a time (`fully_shard`).

    Checkpoints are whole, in one file, and the same as those of one process: any strategy continues them, except ZeRO.
    To write one, the processes gather it tensor by tensor.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Let all processes share the data, and none a tensor."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights on the CPU, in the first process; empty in the others."""
        assert self.lightning_module is not None
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on the CPU, in the first process; empty in the others."""
        return self._whole(
            (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        )

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the tensors of a state one by one, which takes all processes; only the first one keeps them."""

        def gather(tensor: Tensor) -> Tensor | None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return whole.detach().cpu() if self.is_global_zero else None

        gathered = tree_map_only(Tensor, gather, state)
        return gathered if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write one file, as any other strategy does."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read it, in each process."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give each process its shards of the weights."""
        assert self.lightning_module is not None
        module = self.lightning_module
        parameters, own = dict(module.named_parameters()), module.state_dict()
        weights = {
            # parts of a fused projection are joined before they are sharded
            name: _like(parameters[name], weight) if name in parameters else _replicated(weight, own.get(name))
            for name, weight in checkpoint["state_dict"].items()
        }
        module.load_state_dict(weights, strict=strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads the optimiser's state, by the method below."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each process its shards of the optimiser's state."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                index: {name: _like(parameters[index], value) for name, value in values.items()}
                for index, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _replicated(weight: Tensor, own: Tensor | None) -> Tensor:
    """A whole tensor, as one that every process has if its own counterpart is sharded."""
    if not isinstance(own, DTensor):
        return weight
    return DTensor.from_local(weight.to(own.device), own.device_mesh, [Replicate()], run_check=False)


def _like(parameter: Tensor, value: Any) -> Any:
    """A whole tensor of the shape of a parameter, sharded as it is; anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
