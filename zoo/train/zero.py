"""DeepSpeed's ZeRO as a strategy of this project, on GPUs and on CPUs."""

import argparse
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from kernels.errors import UserError
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.format import not_written, read_checkpoint, read_whole_checkpoint
from zoo.checkpoints.zero_shards import (
    SHARDS,
    check_shards,
    divided_alike,
    import_deepspeed,
    new_shards,
    remove_unused_shards,
    shard_hashes,
    shard_names,
    sync,
    undivided,
    unreadable,
    without_code,
)
from zoo.files.atomic import atomic_write
from zoo.lm.model import Block

PRECISIONS = ("32-true", "bf16-mixed")
BUCKET = 2 * 10**8  # numbers that are sent at once
AHEAD = 5 * 10**7  # that are gathered at least, before they are needed


class Zero(DeepSpeedStrategy):
    """ZeRO: what one process would hold for itself is divided among all of them.

    The optimiser and the clipping are those of `optim`, gradients are accumulated by `trainer.accumulate_grad_batches`.
    Parameters, gradients and the optimiser are in fp32; with `bf16-mixed`, products are computed in bf16 as they are
    in one process, by autocast, so that what a mixer computes in fp32 stays in fp32. All processes must see the same
    files: each writes its own part of a checkpoint.

    Args:
        stage: 1 divides the state of the optimiser, 2 also the gradients, 3 also the parameters.
        offload_optimizer: Where the state of the optimiser is kept and used instead of on the GPU; null: on the GPU.
        offload_parameters: Where parameters are kept while no layer needs them; null: on the GPU. Needs stage 3.
        nvme_path: A folder on a fast disk, for what is offloaded to `nvme`.
        config: More sections and keys of DeepSpeed's configuration, which are laid over ours.

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
        zero["stage3_param_persistence_threshold"] = 0  # small parameters would be gathered after a step, one by one
        for name, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_parameters)):
            if device is not None:
                zero[name] = {"device": device, "pin_memory": torch.cuda.is_available()}
                if device == "nvme":
                    zero[name]["nvme_path"] = nvme_path
        ours = {
            "train_micro_batch_size_per_gpu": 1,  # for its logs only; the loaders know how much they load
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # PyTorch's AdamW is vectorised on CPUs too, and is not built first
            "zero_optimization": zero,
        }
        super().__init__(config=_laid_over(ours, config or {}))
        self.stage = stage

    def setup_environment(self) -> None:
        """Choose the devices; the CPU is one."""
        on_cpu = isinstance(self.accelerator, CPUAccelerator)
        self.precision_plugin = ZeroPrecision(self.precision_plugin.precision, "cpu" if on_cpu else "cuda")
        if not on_cpu:
            super().setup_environment()
            return
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        class Plain(CPU_Accelerator):
            """A CPU for which nothing is compiled: between a few processes, Gloo is fast enough."""

            def create_op_builder(self, class_name: str) -> None:
                return None

        set_accelerator(Plain())  # also where there is a GPU that is not to be used
        super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's refuses CPUs

    def setup_distributed(self) -> None:
        """Connect the processes: by NCCL between GPUs, by Gloo between CPUs."""
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = "gloo"
        self._init_deepspeed_distributed()

    def init_deepspeed(self) -> None:
        """Set the engine up, without the warning that it clips by its own configuration: it has ours."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*DeepSpeed handles gradient clipping internally.*")
            super().init_deepspeed()

    def _format_config(self) -> None:
        """Complete DeepSpeed's configuration from what `optim` and `trainer` say."""
        assert isinstance(self.config, dict)
        assert self.lightning_module is not None
        self.config["gradient_clipping"] = self.lightning_module.optim.gradient_clip or 0.0
        super()._format_config()
        if self.precision_plugin.precision == "bf16-mixed":
            del self.config["bf16"]  # would cast all parameters, those of the gates too
            # no module is named whose gradients are to be summed in bf16
            autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
            self.config["torch_autocast"] = {**autocast, **self.config.get("torch_autocast", {})}

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.stage == 3:
            assert isinstance(self.config, dict)
            zero = self.config["zero_optimization"]
            zero.setdefault("stage3_prefetch_bucket_size", max(_gather_by_block(model), AHEAD))
            # Within a machine, to send twice as much takes less time than the host needs to copy part by part.
            zero.setdefault("stage3_use_all_reduce_for_fetch_params", self.num_nodes == 1)
        engine, zero_optimizer = self._initialize(
            model, self.config, model_parameters=trained, optimizer=optimizer, lr_scheduler=lr_scheduler
        )
        zero_optimizer.get_grad_norm_direct = _Norm(zero_optimizer.get_grad_norm_direct)
        engine._copy_recovery_script = lambda folder: None  # its converter, as a file beside each checkpoint
        if self.stage == 3:
            engine.module_state_dict = _PersistentBuffers(model)  # no process has a whole parameter
        return engine, zero_optimizer

    def _initialize(self, model: nn.Module, config: Any, **what: Any) -> tuple[Any, Any]:
        """The engine, and its optimiser, of DeepSpeed's `initialize`."""
        index = self.root_device.index
        rank = argparse.Namespace(device_rank=self.local_rank if index is None else index)  # a CPU has no index
        deepspeed = import_deepspeed("trainer.strategy is ZeRO")
        return deepspeed.initialize(args=rank, config=config, model=model, dist_init_required=False, **what)[:2]

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Without an optimiser there is something to divide in stage 3 only."""
        self.model = model
        if self.stage != 3:
            model.to(self.root_device)
            return
        zero = {"stage": 3, "offload_param": self.config["zero_optimization"].get("offload_param")}
        unused = ("gradient_clipping", "gradient_accumulation_steps")
        config = {key: value for key, value in self.config.items() if key not in unused}
        config["zero_optimization"] = {key: value for key, value in zero.items() if value is not None}
        self.model = self._initialize(model, config, model_parameters=[])[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the engine saves the weights."""
        return {}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimiser step was not applied, in any process, as its gradients were not finite."""
        return bool(self.deepspeed_engine.optimizer.overflow)

    @property
    def gradient_norm(self) -> float | None:
        """Norm of all gradients together in the last step, before clipping; None before the first one."""
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """To go on, shards are given to the engine; to evaluate, whole weights to the module that it will divide."""
        return self._fitting

    @property
    def _fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == "fit"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the parts of all processes to a new folder, then the checkpoint that names it."""
        if storage_options is not None:
            raise TypeError("storage_options are not supported: checkpoints are written to local files")
        path = Path(self.broadcast(str(filepath)))
        name = self.broadcast(new_shards(path.parent, checkpoint["global_step"]))
        shards = path.parent / name
        failures: list[OSError] = []
        with _noted(failures):
            shards.mkdir(parents=True, exist_ok=True)
        self._all_succeeded(path, shards, failures)
        with _noted_saves(self.deepspeed_engine, failures):
            self.deepspeed_engine.save_checkpoint(str(path.parent), tag=name, save_latest=False)
        self._all_succeeded(path, shards, failures)
        files = self._hashes(shards, failures)
        self._all_succeeded(path, shards, failures)
        if self.is_global_zero:
            written = {key: checkpoint[key] for key in checkpoint if key not in ("state_dict", "optimizer_states")}
            with _noted(failures):
                sync(shards)
                entry = {
                    "folder": name,
                    "files": files,
                    "stage": self.stage,
                    "world_size": self.world_size,
                    "parameters": _shapes(self.deepspeed_engine.module),
                }
                with atomic_write(path) as file:
                    save_sealed({**written, SHARDS: entry}, file)
        self._all_succeeded(path, shards, failures)
        if self.is_global_zero:
            remove_unused_shards(path.parent)

    def _all_succeeded(self, path: Path, shards: Path, failures: list[OSError]) -> None:
        """Raise in all processes, none of which waits for another then, if a part could not be written in one."""
        if self.reduce_boolean_decision(not failures, all=True):
            return
        if self.is_global_zero:
            shutil.rmtree(shards, ignore_errors=True)
        raise not_written(path, failures[0] if failures else OSError("another process could not write its part"))

    def _hashes(self, shards: Path, failures: list[OSError]) -> dict[str, list[Any]]:
        """File → its bytes and its hash; each process hashes some of the files."""
        names = self.broadcast(shard_names(shards))
        own: dict[str, list[Any]] = {}
        with _noted(failures):
            own = shard_hashes(shards, names[self.global_rank :: self.world_size])
        parts: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(parts, own)
        return {name: described for part in parts for name, described in part.items()}

    def _check(self, path: Path, shards: Mapping[str, Any]) -> None:
        """Raise a UserError in all processes, which share the work, if a shard is missing or damaged."""
        problem = None
        try:
            check_shards(path, shards, (self.global_rank, self.world_size))
        except UserError as error:
            problem = error
        if not self.reduce_boolean_decision(problem is None, all=True):
            raise problem or UserError(f"{path} is damaged, as another process found.")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: its shards of this process to go on, else its whole weights.

        Raises:
            UserError: There is none, it is damaged, or it is of another strategy or model.
        """
        if not self._fitting:
            return read_whole_checkpoint(checkpoint_path)
        path = Path(checkpoint_path)
        checkpoint = read_checkpoint(path)
        alike = divided_alike(path, checkpoint, self.stage, self.world_size)
        shards = checkpoint[SHARDS]
        self._check(path, shards)
        if (saved := shards["parameters"]) != (own := _shapes(self.deepspeed_engine.module)):
            other = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
            raise UserError(f"{path} does not fit the model: {len(other)} parameters differ, first {other[0]}.")
        if alike:
            self._load_shards(path, shards["folder"])
        else:
            self._divide_anew(path, shards)
        return checkpoint

    def _load_shards(self, path: Path, name: str) -> None:
        """Give the engine its part of the shards `name` of a checkpoint."""
        try:
            with without_code():
                self.deepspeed_engine.load_checkpoint(
                    str(path.parent),
                    tag=name,
                    load_module_strict=self.stage != 3,  # where parameters are no part of the module's state
                    load_optimizer_states=True,
                    load_lr_scheduler_states=False,
                )
        except pickle.UnpicklingError as error:
            raise unreadable(path, error) from error

    def _divide_anew(self, path: Path, shards: Mapping[str, Any]) -> None:
        """Load shards of another stage, 1 or 2, or of another number of processes."""
        with undivided(path, shards) if self.is_global_zero else nullcontext() as made:
            name = self.broadcast(None if made is None else made.name)
            self.deepspeed_engine._config.load_universal_checkpoint = True
            try:
                self._load_shards(path, name)
            finally:
                self.deepspeed_engine._config.load_universal_checkpoint = False
            self.barrier()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights to evaluate; the engine has loaded its shards already."""
        if not self._fitting:
            assert self.lightning_module is not None
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)


class ZeroPrecision(DeepSpeedPrecision):
    """The precision of `Zero`: fp32, or bf16 by autocast also where the module is called without its engine.

    Args:
        precision: `32-true` or `bf16-mixed`.
        device: Kind of the devices, `cuda` or `cpu`.

    Raises:
        UserError: Another precision.
    """

    def __init__(self, precision: Any, device: str) -> None:
        if precision not in PRECISIONS:
            raise UserError(f"trainer.precision: ZeRO is used with {' or '.join(PRECISIONS)} here, not {precision}.")
        super().__init__(precision)
        self.device = device

    def forward_context(self) -> AbstractContextManager:
        """Autocast as the engine does it, for validation samples and measurements."""
        if self.precision == "32-true":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def convert_input(self, data: Any) -> Any:
        """Tokens and labels as they are."""
        return data

    def backward(self, tensor: Any, model: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        """Let the engine compute the gradients of a loss that is divided by the number of its batches already."""
        model.trainer.strategy.deepspeed_engine.backward(tensor, scale_wrt_gas=False)

    def _clip_gradients(self, model: L.LightningModule | nn.Module, optimizer: Any, *_: Any, **__: Any) -> None:
        """The engine clips; what a parameter holds here is the gradient of this process alone."""


class _Norm:
    """The norm of many gradients by a few calls; DeepSpeed makes three for each, while the GPU waits.

    Args:
        norm: DeepSpeed's: of the gradients in this process, with those of the same parameters in all of them.
    """

    def __init__(self, norm: Callable[..., torch.Tensor]) -> None:
        self._norm = norm

    def __call__(self, gradients: Sequence[torch.Tensor], parameters: Any, norm_type: float = 2) -> torch.Tensor:
        if not gradients:
            return self._norm(gradients, parameters, norm_type)
        return self._norm([torch.nn.utils.get_total_norm(gradients, norm_type)], parameters, norm_type)


class _PersistentBuffers:
    """Stands for the state dict of a module whose parameters are divided: what is left is its buffers.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Name → buffer; the arguments are those of the engine, which gives none but the last."""
        return {
            f"{name}.{key}" if name else key: buffer
            for name, part in self._module.named_modules()
            for key, buffer in part.named_buffers(recurse=False)
            if key not in part._non_persistent_buffers_set
        }


@contextmanager
def _noted(failures: list[OSError]) -> Iterator[None]:
    """Note, instead of raising, that something cannot be written."""
    try:
        yield
    except OSError as error:
        failures.append(error)


@contextmanager
def _noted_saves(engine: Any, failures: list[OSError]) -> Iterator[None]:
    """Inside the `with` block a file that the engine cannot write is noted, and the engine goes on.

    It would end in this process alone, and leave the others waiting.
    """
    save = engine.checkpoint_engine.save

    def save_or_note(state_dict: Any, path: str) -> None:
        try:
            save(state_dict, path)
        except OSError as error:
            failures.append(error)
        except RuntimeError:  # what PyTorch's writer makes of a full disk: "unexpected pos 128 vs 0"
            failures.append(OSError(f"only a part of {path} could be written; is the disk full?"))

    engine.checkpoint_engine.save = save_or_note
    try:
        yield
    finally:
        engine.checkpoint_engine.save = save


def _gather_by_block(model: nn.Module) -> int:
    """Have all parameters of a block gathered at once, and not those of one of its layers after the other.

    Each gathering takes the host a while, in which the GPU could have computed a whole layer.

    Returns:
        How many numbers the largest block has: as many have to be gathered ahead, for it to be there in time.
    """
    from deepspeed.utils import set_z3_leaf_module

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        set_z3_leaf_module(block, True)
    return max((sum(parameter.numel() for parameter in block.parameters()) for block in blocks), default=0)


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    """Name of a parameter → its shape, undivided."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def _laid_over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both as one, section by section; `above` counts where both have a value."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _laid_over(merged[key], value) if both else value
    return merged
