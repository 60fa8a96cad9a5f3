"""FSDP2 as a strategy of this project: parameters, gradients and optimiser sharded by PyTorch.

Tried with Lightning 2.6, whose `ModelParallelStrategy` looks the parameters of a checkpoint up by attribute names; a
fused projection saves its parts under names of their own.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from kernels.core.torch_internals import tree_map_only
from kernels.errors import UserError
from zoo.checkpoints.background import Background
from zoo.checkpoints.format import check_weights, read_checkpoint
from zoo.checkpoints.fsdp_shards import named_tensors, read_tensors, with_tensors, without_tensors, write_tensors
from zoo.checkpoints.zero_shards import SHARDS, TENSORS
from zoo.train.lightning_internals import share_data_only
from zoo.train.shards import check_together, save_with_shards


class FSDP2(ModelParallelStrategy):
    """Shards parameters, gradients and the optimiser over all processes, a block at a time (`fully_shard`).

    Any number of processes and any strategy but ZeRO continues its checkpoints, in one file or sharded.

    Args:
        sharded_checkpoints: Each process writes its parts to a folder next to a small `.ckpt`, in the format of
            `torch.distributed.checkpoint`; all must see the same file system. Otherwise a checkpoint is one file, which
            the processes gather tensor by tensor in the memory of the first one.
    """

    def __init__(self, sharded_checkpoints: bool = False) -> None:
        super().__init__(save_distributed_checkpoint=False)  # Lightning's are a folder, and neither atomic nor sealed
        self.sharded_checkpoints = sharded_checkpoints
        self._in_background: DeviceMesh | None = None

    def setup_environment(self) -> None:
        """Let all processes share the data, and none a tensor."""
        share_data_only(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights on the CPU, in the first process; empty in the others. Sharded: those of this process."""
        assert self.lightning_module is not None
        if self.sharded_checkpoints:
            return _registered(self.lightning_module)
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on the CPU, in the first process; empty in the others. Sharded: that of this process."""
        state = (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        return state if self.sharded_checkpoints else self._whole(state)

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the tensors of a state one by one, which takes all processes; only the first one keeps them."""

        def gather(tensor: Tensor) -> Tensor | None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return whole.detach().cpu() if self.is_global_zero else None

        gathered = tree_map_only(Tensor, gather, state)
        return gathered if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write one file, as any other strategy does, or the shards of all processes and then the file that names them.

        If `storage_options` is a `Background`, the shards are copied now, and written by that thread.

        Raises:
            UserError: A process could not write; in all processes.
        """
        if not self.sharded_checkpoints:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        states = checkpoint.get("optimizer_states", [])
        tensors = named_tensors(checkpoint["state_dict"], states)
        rest = {**checkpoint, "optimizer_states": without_tensors(states)}
        if isinstance(storage_options, Background):
            mesh = self._background_mesh()
            local = {name: _local(tensor) for name, tensor in tensors.items()}
            rest = storage_options.copy({**rest, "state_dict": local}, checkpoint["global_step"])
            tensors = {name: _wrapped(rest["state_dict"][name], tensors[name], mesh) for name in tensors}
            storage_options.add(partial(_save_shards, rest, tensors, filepath, mesh.get_group()))
        elif storage_options is not None:
            raise TypeError("storage_options are not supported: checkpoints are written to local files")
        else:
            _save_shards(rest, tensors, filepath)

    def prepare_background(self, background: Background) -> None:
        """Have memory for copies of the weights and two moments allocated while the first steps run."""
        assert self.lightning_module is not None
        self._background_mesh()
        if self.root_device.type == "cuda":
            background.reserve([_local(parameter).nbytes for parameter in self.lightning_module.parameters()] * 3)

    def _background_mesh(self) -> DeviceMesh:
        """All processes, on their CPUs, in a group for the thread that writes.

        Messages of two threads in one group would be taken for each other's.
        """
        if self._in_background is None:
            self._in_background = DeviceMesh.from_group(torch.distributed.new_group(backend="gloo"), "cpu")
        return self._in_background

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read it, in each process; of a sharded one each reads its part, whichever processes wrote it.

        Raises:
            UserError: The checkpoint is missing, damaged, or of another model.
        """
        path = Path(checkpoint_path)
        checkpoint = read_checkpoint(path)
        if SHARDS not in checkpoint:
            return checkpoint
        if TENSORS not in checkpoint[SHARDS]:
            return Strategy.load_checkpoint(self, path, weights_only)
        shards = checkpoint.pop(SHARDS)
        check_together(self, path, shards)
        tensors = self._counterparts(path, checkpoint, shards[TENSORS])
        read_tensors(path, shards, tensors)
        return with_tensors(checkpoint, tensors)

    def _counterparts(self, path: Path, checkpoint: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Name in a sharded checkpoint → a tensor to read into, sharded as this run's is; optimisers' only to train."""
        assert self.lightning_module is not None
        whole = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape, _) in saved.items()}
        described = with_tensors(checkpoint, whole)
        check_weights(described["state_dict"], self.lightning_module, path)
        weights = {name: torch.zeros_like(own) for name, own in _registered(self.lightning_module).items()}
        states = []
        for optimizer, optimizer_state in zip(self.optimizers, described["optimizer_states"], strict=False):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if misplaced := [index for index in optimizer_state["state"] if index >= len(parameters)]:
                raise UserError(f"{path} does not fit the optimiser, which has no parameter {misplaced[0]}.")
            state = {
                index: {name: _zeros(parameters[index], value) for name, value in values.items()}
                for index, values in optimizer_state["state"].items()
            }
            states.append({"state": state})
        return named_tensors(weights, states)

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
        """Return whether Lightning loads the optimiser's state, by the method below."""
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


def _save_shards(
    checkpoint: dict[str, Any],
    tensors: dict[str, Tensor],
    filepath: Any,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    def write(path: Path, shards: Path, failures: list[OSError]) -> dict[str, Any]:
        return {TENSORS: write_tensors(shards, tensors, group)}

    save_with_shards(checkpoint, filepath, write, ("state_dict",), group)


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _wrapped(local: Tensor, original: Tensor, mesh: DeviceMesh) -> Tensor:
    """A part of a tensor, copied to the host, as such a part; `original` says of what, and `mesh` has its processes."""
    if not isinstance(original, DTensor):
        return local
    shape, stride = original.shape, original.stride()
    return DTensor.from_local(local, mesh, original.placements, run_check=False, shape=shape, stride=stride)


def _registered(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and saved buffers of a module themselves; a state dict may have copies of their parts."""
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


def _zeros(parameter: Tensor, value: Any) -> Any:
    """Zeros in place of a whole tensor, sharded as a parameter if of its shape; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=value.dtype)
    return torch.zeros_like(value, device="cpu")


def _replicated(weight: Tensor, own: Tensor | None) -> Tensor:
    """A whole tensor, replicated on every process if its counterpart `own` is sharded."""
    if not isinstance(own, DTensor):
        return weight
    return DTensor.from_local(weight.to(own.device), own.device_mesh, [Replicate()], run_check=False)


def _like(parameter: Tensor, value: Any) -> Any:
    """A whole tensor of the shape of a parameter, sharded like it; anything else unchanged."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
