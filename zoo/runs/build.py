"""From a parsed config to Lightning objects: the module, its data, and a trainer with this project's callbacks."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import Option, UserError, is_deterministic
from mixers import TokenMixer
from zoo import config as configs
from zoo.arguments import errors_about
from zoo.data.contract import tokenizer_of
from zoo.data.text.tokenizer import Tokenizer
from zoo.lm.model import LanguageModel
from zoo.runs.errors import trainer_error
from zoo.saved.model import SavedModel
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.captured_steps import CapturedSteps
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.callbacks.compiled_blocks import CompiledBlocks
from zoo.train.callbacks.progress_bar import Progress
from zoo.train.callbacks.run_callback import run_callbacks
from zoo.train.devices import use_processor
from zoo.train.distillation import Distillation
from zoo.train.lightning_internals import checkpoint_io
from zoo.train.metrics_file import MetricsFile
from zoo.train.module import Pretraining, best_precision
from zoo.train.trainer import install
from zoo.train.zero import Zero

log = logging.getLogger(__name__)

# Lightning's strategies whose checkpoints these models do not fit, or `fit --resume` cannot read
REPLACED: dict[type, str] = {
    ModelParallelStrategy: "zoo.train.fsdp2.FSDP2, as train/fsdp.yaml does",
    DeepSpeedStrategy: "zoo.train.zero.Zero, as train/zero2.yaml does, and train/cpu_deepspeed.yaml on CPUs",
}


def seed(config: Namespace) -> None:
    """Seed all random numbers by `seed_everything`; for `true` a seed is drawn, and stored in the config."""
    if config.seed_everything is not False:
        number = None if config.seed_everything is True else config.seed_everything
        config.seed_everything = L.seed_everything(number, workers=True, verbose=False)


def parts(
    config: Namespace, links: Callable[[Namespace, L.LightningDataModule], None] | None = None
) -> tuple[LanguageModel, Pretraining, L.LightningDataModule]:
    """Build the model of a config, the module around it, and its data, and set its `model.vocab_size`.

    Args:
        config: A resolved config.
        links: Called with it and its data module, to set keys of the config by what the data turned out to be.

    Raises:
        UserError: A constructor rejects a value, or two keys contradict each other.
    """
    seed(config)
    _check_accelerator(config.trainer)
    datamodule = configs.instantiate("data", config)
    if links is not None:
        links(config, datamodule)
    _check_labels(config, datamodule)
    tokenizer = tokenizer_of(datamodule)
    _check_tokenizer(config.optim.initial_weights, tokenizer, ", or start from its weights alone, a .safetensors file")
    _check_tokenizer(config.teacher.checkpoint, tokenizer)
    config.model.vocab_size = configs.vocabulary(config, datamodule)
    teacher = None
    if (path := config.teacher.checkpoint) is not None:
        with errors_about("teacher.checkpoint"):
            teacher = SavedModel.open(path).load()
    seed(config)  # again: whether a tokenizer was just trained must not change the model
    model = configs.from_config(config)
    if config.trainer.accelerator == "cpu" or not torch.accelerator.is_available():
        for part in model.modules():
            if isinstance(part, TokenMixer):
                part.check_device(torch.device("cpu"))
    if model.head is not None and model.head.num_classes < (classes := datamodule.num_classes):
        raise UserError(f"model.head.num_classes: {model.head.num_classes} are fewer than the {classes} of the data")
    size = config.context_parallel
    if size > 1 and config.compile:
        raise UserError(f"context_parallel: {size} processes cannot share sequences of compiled blocks yet")
    module = Pretraining(
        model,
        configs.instantiate("optim", config),
        tokenizer,
        configs.to_dict(config),
        getattr(datamodule, "sequence_length", None),
        getattr(datamodule, "validation_names", ()),
        size,
        getattr(datamodule, "extra_sets", ()),
        None if teacher is None else Distillation(configs.instantiate("teacher", config), teacher, model),
        config.sequence_parts,
    )
    return model, module, datamodule


def _check_accelerator(trainer: Namespace) -> None:
    """Refuse GPUs that do not exist, and warn of too few CPU cores, before the data is prepared."""
    cores = os.cpu_count() or 1
    on_cpu = trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not torch.accelerator.is_available())
    if on_cpu and isinstance(trainer.devices, int) and trainer.devices > cores:
        log.warning(
            "trainer.devices: %d processes share %d CPU cores, and each holds the model", trainer.devices, cores
        )
    missing = trainer.accelerator in ("gpu", "cuda") and not torch.accelerator.is_available()
    all_of_them = str(trainer.devices) == "-1"
    if not missing and not (trainer.accelerator == "cpu" and all_of_them):
        return
    if missing:
        wrong = f"trainer.accelerator: {trainer.accelerator}, but PyTorch finds no GPU here; for the CPU"
    else:
        wrong = f"trainer.devices: {trainer.devices} means all GPUs; for processes on the CPU"
    if str(getattr(trainer.strategy, "class_path", "")) == f"{Zero.__module__}.{Zero.__qualname__}":
        raise UserError(f"{wrong}, add ", Option("config", "train/cpu_deepspeed.yaml"))
    parts: list[str | Option] = [f"{wrong}, set"]
    if missing:
        parts += [" ", Option("trainer.accelerator", "cpu")]
    if all_of_them:
        parts += [" ", Option("trainer.devices", "1 (or more)")]
    raise UserError(*parts)


def _check_tokenizer(path: str | None, tokenizer: Tokenizer | None, advice: str = "") -> None:
    """Refuse tokens that mean something else to the model at a path, from which a run starts or learns."""
    if path is None or tokenizer is None:
        return
    try:
        trained = SavedModel.open(path).tokenizer
    except UserError:  # weights alone, or nothing that can be read, which whoever loads them says
        return
    if trained is not None and not trained.alike(tokenizer):
        raise UserError(
            f"data.tokenizer: {path} was trained with another tokenizer than that of the data; set ",
            Option("data.tokenizer", path),
            advice,
        )


def _check_labels(config: Namespace, datamodule: L.LightningDataModule) -> None:
    """Check that the data labels what the head of the model predicts: tokens, or whole sequences."""
    head, data = config.model.head, type(datamodule).__name__
    of_sequences = hasattr(datamodule, "num_classes")
    if head is None and of_sequences:
        raise UserError(f"model.head: null predicts tokens, but {data} labels whole sequences; use Classifier")
    if head is not None and not of_sequences:
        name = head.class_path.rpartition(".")[2]
        raise UserError(f"model.head: {name} labels whole sequences, but {data} has tokens to predict; use null")


def fitting_trainer(config: Namespace, folder: Path, callbacks: Sequence[Callback]) -> L.Trainer:
    """The trainer of a run, with all its callbacks; a UserError if `trainer` or a callback's argument is invalid."""
    if odd := [each for each in callbacks if not isinstance(each, Callback)]:
        raise UserError(f"callbacks: {odd[0]!r} is not a callback of Lightning")
    arguments = _arguments(for_run(config, folder))
    arguments["default_root_dir"] = str(folder)
    if arguments["logger"] is not False:
        arguments["logger"] = [MetricsFile(folder), *_loggers(arguments)]
    user_callbacks = [*_listed(arguments["callbacks"]), *callbacks]
    ours = [*_progress(arguments, user_callbacks), *_run_callbacks(config)]
    if any(isinstance(callback, LearningRateFinder) for callback in user_callbacks):
        raise UserError("trainer.callbacks: LearningRateFinder is not possible here; sweep optim.learning_rate instead")
    if arguments["enable_checkpointing"] is False:
        ours = [callback for callback in ours if not isinstance(callback, Checkpoints)]
    arguments["callbacks"] = [*user_callbacks, *ours]
    return _trainer(arguments, deterministic=bool(config.deterministic_kernels))


def evaluating_trainer(limit: str, config: Namespace, folder: Path, callbacks: Sequence[Callback]) -> L.Trainer:
    """A trainer for evaluating a checkpoint; a UserError if `trainer` is invalid, or its `limit` of batches is 0."""
    if config.trainer.get(limit) == 0:
        raise UserError(f"trainer.{limit}: 0 leaves nothing to measure; it must be above 0")
    arguments = _arguments(for_run(config, folder))
    arguments["logger"] = _loggers(arguments)
    user_callbacks = [*_listed(arguments["callbacks"]), *callbacks]
    arguments["callbacks"] = [*user_callbacks, *_progress(arguments, user_callbacks)]
    return _trainer(arguments)


def _progress(arguments: Mapping[str, Any], user_callbacks: Sequence[Callback]) -> list[Callback]:
    """Our progress bar, unless the user has another one or wants none."""
    other = any(isinstance(callback, ProgressBar) for callback in user_callbacks)
    return [] if other or arguments["enable_progress_bar"] is False else [Progress()]


def _run_callbacks(config: Namespace) -> list[Callback]:
    """All callbacks of this project, in order."""
    built: list[Any] = [
        configs.instantiate(cls.key, config) if cls.key is not None else cls() for cls in run_callbacks()
    ]
    if config.compile:
        if config.deterministic_kernels:
            raise UserError("deterministic_kernels: true does not cover compiled code; set compile to false")
        built.append(CompiledBlocks())
    if configs.captures_steps(config):
        built.append(CapturedSteps(automatic=config.cuda_graph is None))
    if (interval := config.activation_checkpointing) is not None:
        built.append(CheckpointedBlocks(interval))
    return sorted(built, key=lambda callback: callback.order)


def _arguments(config: Namespace) -> dict[str, Any]:
    """The arguments of the Trainer, instantiated."""
    try:
        arguments = dict(configs.instantiate("trainer", config))
    except MisconfigurationException as error:
        raise trainer_error(error) from None
    except ImportError as error:
        missing: BaseException | None = error
        while missing is not None and not isinstance(missing, ModuleNotFoundError):
            missing = missing.__cause__ or missing.__context__
        if config.trainer.logger is None or missing is None:
            raise
        reason = str(missing).partition("\n")[0].partition(". ")[0].rstrip(".")
        advice = "install the loggers' packages with pip install -e '.[loggers]'"
        raise UserError(f"trainer.logger: {reason}; {advice}") from None
    arguments["precision"] = arguments["precision"] or best_precision(str(arguments["accelerator"]))
    return arguments


def _trainer(arguments: Mapping[str, Any], deterministic: bool = False) -> L.Trainer:
    try:
        trainer = L.Trainer(**{**arguments, "enable_model_summary": False})  # `run_fit` prints another
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise trainer_error(error) from None
    if (instead := REPLACED.get(type(trainer.strategy))) is not None:
        raise UserError(f"trainer.strategy: {type(trainer.strategy).__name__} is not possible here; use {instead}")
    if isinstance(checkpoint_io(trainer.strategy), AsyncCheckpointIO):
        raise UserError(
            "trainer.plugins: AsyncCheckpointIO is not possible here; set checkpoints.in_background to true instead"
        )
    if trainer.strategy.root_device.type == "cpu":
        use_processor(deterministic=is_deterministic() or deterministic)
    install(trainer)
    return trainer


def for_run(config: Namespace, folder: Path) -> Namespace:
    """Return a config with `{run}` replaced by the run's folder, and `{name}` by its name, in all of `trainer`."""
    config = config.clone()
    config.trainer = _filled(config.trainer, {"{run}": str(folder), "{name}": folder.resolve().name})
    return config


def _filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for placeholder, name in names.items():
            value = value.replace(placeholder, name)
        return value
    if isinstance(value, Namespace):
        return Namespace({key: _filled(item, names) for key, item in vars(value).items()})
    if isinstance(value, dict):
        return {key: _filled(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, names) for item in value]
    return value


def _loggers(arguments: dict[str, Any]) -> list[Logger]:
    return [logger for logger in _listed(arguments["logger"]) if isinstance(logger, Logger)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
