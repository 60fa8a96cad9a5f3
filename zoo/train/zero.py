"""DeepSpeed's ZeRO as a strategy of this project, on GPUs and on CPUs."""

import argparse
import pickle
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from kernels.errors import UserError
from zoo.checkpoints.format import read_checkpoint, read_whole_checkpoint
from zoo.checkpoints.zero_shards import SHARDS, divided_alike, import_deepspeed, undivided, unreadable, without_code
from zoo.lm.block import Block
from zoo.train.lightning_internals import DeepSpeedSteps, UnclippedPrecision
from zoo.train.shards import all_succeeded, check_together, noted, save_with_shards

if TYPE_CHECKING:
    from zoo.train.zero_engine import Engine

PRECISIONS = ("32-true", "bf16-mixed")
BUCKET = 2 * 10**8  # numbers sent in one message
PREFETCH = 5 * 10**7  # numbers to gather ahead of use, at least


class Zero(DeepSpeedSteps):
    """ZeRO: optimiser state, gradients and parameters are sharded across processes.

    Optimiser and clipping are those of `optim`, gradient accumulation is `trainer.accumulate_grad_batches`.
    Parameters, gradients and optimiser state are fp32; with `bf16-mixed`, autocast computes products in bf16 as on a
    single device, so that what a mixer computes in fp32 stays in fp32. All processes must see the same file system:
    each writes its ZeRO shard of a checkpoint.

    Args:
        stage: 1 shards the optimiser state, 2 also the gradients, 3 also the parameters.
        offload_optimizer: Where the optimiser state is kept and updated; null: on the GPU.
        offload_parameters: Where parameters are kept while no layer needs them; null: on the GPU. Requires stage 3.
        nvme_path: A folder on a fast disk, for offloading to `nvme`.
        config: Further sections and keys of DeepSpeed's configuration, which override ours.

    Raises:
        UserError: DeepSpeed is not installed, or the arguments contradict each other.
    """

    precision_plugin: Any  # a property of the base class

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_parameters: Literal["cpu", "nvme"] | None = None,
        nvme_path: str = "/local_nvme",
        config: dict[str, Any] | None = None,
    ) -> None:
        import_deepspeed("trainer.strategy is ZeRO")
        if offload_parameters and stage != 3:
            raise UserError(f"trainer.strategy: offload_parameters needs stage 3, which divides them; it is {stage}.")
        if "nvme" in (offload_optimizer, offload_parameters) and stage != 3:
            raise UserError(f"trainer.strategy: only stage 3 offloads to nvme; the stage is {stage}.")
        zero: dict[str, Any] = {"stage": stage, "allgather_bucket_size": BUCKET, "reduce_bucket_size": BUCKET}
        zero["overlap_comm"] = True
        zero["stage3_param_persistence_threshold"] = 0  # else small parameters are gathered one by one after a step
        for name, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_parameters)):
            if device is not None:
                zero[name] = {"device": device, "pin_memory": torch.cuda.is_available()}
                if device == "nvme":
                    zero[name]["nvme_path"] = nvme_path
        ours = {
            "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's logs; the data loaders set the batch size
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # PyTorch's AdamW is vectorised on CPUs too, and needs no build
            "zero_optimization": zero,
        }
        super().__init__(config=_merged(ours, config or {}))
        self.stage = stage

    def setup_environment(self) -> None:
        """Choose the devices; unlike in Lightning, CPUs are allowed."""
        on_cpu = isinstance(self.accelerator, CPUAccelerator)
        self.precision_plugin = ZeroPrecision(self.precision_plugin.precision, "cpu" if on_cpu else "cuda")
        if not on_cpu:
            super().setup_environment()
            return
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        class Plain(CPU_Accelerator):
            """A CPU without compiled ops: between a few processes, Gloo is fast enough."""

            def create_op_builder(self, class_name: str) -> None:
                return None

        set_accelerator(Plain())  # even on a machine with a GPU
        super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's refuses CPUs

    def setup_distributed(self) -> None:
        """Connect the processes: by NCCL between GPUs, by Gloo between CPUs."""
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self.connect_by("gloo")

    def init_deepspeed(self) -> None:
        """Set up the engine, without the warning that DeepSpeed's configuration sets the clipping, as it does here."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*DeepSpeed handles gradient clipping internally.*")
            super().init_deepspeed()

    def complete_config(self) -> None:
        """Complete DeepSpeed's configuration from `optim` and `trainer`."""
        assert isinstance(self.config, dict)
        assert self.lightning_module is not None
        self.config["gradient_clipping"] = self.lightning_module.optim.gradient_clip or 0.0
        super().complete_config()
        if self.precision_plugin.precision == "bf16-mixed":
            del self.config["bf16"]  # it would cast all parameters, even those of gates
            # an empty list: sum no module's gradients in bf16
            autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
            self.config["torch_autocast"] = {**autocast, **self.config.get("torch_autocast", {})}

    def build_engine(self, model: nn.Module, optimizer: Any, lr_scheduler: Any) -> tuple[Any, Any]:
        """The engine and its optimiser, set up for this project."""
        from zoo.train.zero_engine import norm_in_few_calls

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.stage == 3:
            assert isinstance(self.config, dict)
            zero = self.config["zero_optimization"]
            zero.setdefault("stage3_prefetch_bucket_size", max(_gather_by_block(model), PREFETCH))
            # Within a machine, sending twice as much is faster than copying part by part on the host.
            zero.setdefault("stage3_use_all_reduce_for_fetch_params", self.num_nodes == 1)
        arguments = {"model_parameters": trained, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        engine = self._engine(model, self.config, **arguments)
        norm_in_few_calls(engine.optimizer)
        return engine, engine.optimizer

    def _engine(self, model: nn.Module, config: Any, **arguments: Any) -> "Engine":
        from deepspeed import DeepSpeedConfig

        from zoo.train.zero_engine import Engine

        index = self.root_device.index
        rank = argparse.Namespace(device_rank=self.local_rank if index is None else index)  # a CPU has no index
        arguments |= {"args": rank, "config_class": DeepSpeedConfig(config), "dist_init_required": False}
        return Engine(model=model, config=config, **arguments)

    def set_up_evaluation(self, model: nn.Module) -> None:
        """Shard the parameters in stage 3; without an optimiser the other stages have nothing to shard."""
        self.model = model
        if self.stage != 3:
            model.to(self.root_device)
            return
        zero = {"stage": 3, "offload_param": self.config["zero_optimization"].get("offload_param")}
        unused = ("gradient_clipping", "gradient_accumulation_steps")
        config = {key: value for key, value in self.config.items() if key not in unused}
        config["zero_optimization"] = {key: value for key, value in zero.items() if value is not None}
        self.model = self._engine(model, config, model_parameters=[])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """An empty dictionary: the engine saves the weights."""
        return {}

    @property
    def step_was_skipped(self) -> bool:
        """Return whether all processes skipped the last optimiser step because of non-finite gradients."""
        return bool(self.deepspeed_engine.optimizer.overflow)

    @property
    def gradient_norm(self) -> float | None:
        """Total gradient norm of the last step, before clipping; None before the first step."""
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True to resume: the engine loads ZeRO shards. To evaluate, the module loads whole weights before sharding."""
        return self._fitting

    @property
    def _fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == "fit"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the ZeRO shards of all processes to a new folder, then the checkpoint that names it."""
        if storage_options is not None:
            raise TypeError("storage_options are not supported: checkpoints are written to local files")
        save_with_shards(checkpoint, filepath, self._write_shards, ("state_dict", "optimizer_states"))

    def _write_shards(self, path: Path, shards: Path, failures: list[OSError]) -> dict[str, Any]:
        with noted(failures):
            shards.mkdir(parents=True, exist_ok=True)
        all_succeeded(path, failures)
        self.deepspeed_engine.checkpoint_engine.failures = failures
        self.deepspeed_engine.save_checkpoint(str(shards.parent), tag=shards.name, save_latest=False)
        parameters = _shapes(self.deepspeed_engine.module)
        return {"stage": self.stage, "world_size": self.world_size, "parameters": parameters}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: the ZeRO shards of this process to resume, otherwise its whole weights.

        Raises:
            UserError: The checkpoint is missing, damaged, or of another strategy or model.
        """
        if not self._fitting:
            return read_whole_checkpoint(checkpoint_path)
        path = Path(checkpoint_path)
        checkpoint = read_checkpoint(path)
        alike = divided_alike(path, checkpoint, self.stage, self.world_size)
        shards = checkpoint[SHARDS]
        check_together(self, path, shards)
        if (saved := shards["parameters"]) != (current := _shapes(self.deepspeed_engine.module)):
            differing = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
            raise UserError(f"{path} does not fit the model: {len(differing)} parameters differ, first {differing[0]}.")
        if alike:
            self._load_shards(path, shards["folder"])
        else:
            self._reshard(path, shards)
        return checkpoint

    def _load_shards(self, path: Path, name: str) -> None:
        """Load this process's ZeRO shards from the folder `name` into the engine."""
        try:
            with without_code():
                self.deepspeed_engine.load_checkpoint(
                    str(path.parent),
                    tag=name,
                    load_module_strict=self.stage != 3,  # in stage 3 the module's state has no parameters
                    load_optimizer_states=True,
                    load_lr_scheduler_states=False,
                )
        except pickle.UnpicklingError as error:
            raise unreadable(path, error) from error

    def _reshard(self, path: Path, shards: Mapping[str, Any]) -> None:
        """Load ZeRO shards of another stage, 1 or 2, or of another number of processes."""
        with undivided(path, shards) if self.is_global_zero else nullcontext() as folder:
            name = self.broadcast(None if folder is None else folder.name)
            self.deepspeed_engine._config.load_universal_checkpoint = True
            try:
                self._load_shards(path, name)
            finally:
                self.deepspeed_engine._config.load_universal_checkpoint = False
            self.barrier()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights for evaluation; to resume, the engine has loaded its ZeRO shards already."""
        if not self._fitting:
            assert self.lightning_module is not None
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)


class ZeroPrecision(UnclippedPrecision):
    """The precision of `Zero`: fp32, or bf16 by autocast also where the module is called without its engine.

    Raises:
        UserError: The precision is neither `32-true` nor `bf16-mixed`.
    """

    def __init__(self, precision: Any, device: str) -> None:
        if precision not in PRECISIONS:
            raise UserError(f"trainer.precision: ZeRO is used with {' or '.join(PRECISIONS)} here, not {precision}.")
        super().__init__(precision)
        self.device = device

    def forward_context(self) -> AbstractContextManager:
        """Autocast as in the engine, for validation samples and measurements."""
        if self.precision == "32-true":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def convert_input(self, data: Any) -> Any:
        """The batch, unchanged: tokens and labels are integers."""
        return data

    def backward(self, tensor: Any, model: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        """Compute gradients by the engine; the loss is already divided by the number of accumulated batches."""
        model.trainer.strategy.deepspeed_engine.backward(tensor, scale_wrt_gas=False)


def _gather_by_block(model: nn.Module) -> int:
    """Make ZeRO 3 gather all parameters of a block together; return the number of parameters of the largest block.

    Each gathering takes the host about as long as the GPU needs for a whole layer.
    """
    from deepspeed.utils import set_z3_leaf_module

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        set_z3_leaf_module(block, True)
    return max((sum(parameter.numel() for parameter in block.parameters()) for block in blocks), default=0)


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    """Name of a parameter → its whole shape."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def _merged(base: dict[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated by `override`, section by section."""
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
