"""Training and evaluation with Lightning, behind the functions of `zoo.runs.fit`, which describe the arguments."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from kernels import Option, UserError
from zoo import config as configs
from zoo.arguments import check_not_empty, errors_about
from zoo.config.find import CONFIGS
from zoo.config.overlays import Item, first_name, is_override, load_items
from zoo.config.trainer import LIMITS, check_trainer, check_training
from zoo.generation.generate import write
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.runs.build import evaluating_trainer, fitting_trainer, parts
from zoo.runs.errors import FirstBatch, errors_explained, quiet
from zoo.runs.folder import RUNS, claimed, find_run, new_run, run_of
from zoo.saved.hub import on_hub
from zoo.saved.model import Checkpoint, SavedModel, checkpoint_of
from zoo.saved.trust import not_trusted
from zoo.train.callbacks.predictions import Predictions
from zoo.train.callbacks.result_row import ResultRow
from zoo.train.results import metrics_table, read_row

Items = list[str | dict[str, Any]]  # what `load_items` returns


@quiet()
def fit(
    configs_and_overrides: Sequence[Item],
    run: str | None,
    resume: str | Path | None,
    overwrite: bool,
    trust: bool,
    callbacks: Sequence[Callback],
) -> tuple[Path, dict[str, Any], LanguageModel]:
    """Train a model; returns the folder of the run, its results, and the model."""
    if resume is not None and run is not None:
        raise UserError(
            "run: ", Option("run"), " names a new run and ", Option("resume"), " continues one; give one of them"
        )
    if resume is not None and overwrite:
        raise UserError("overwrite: a run that is continued by resume cannot be replaced; give one of them")
    check_not_empty("run", run)
    items = load_items(configs_and_overrides)
    folder, checkpoint = (None, None) if resume is None else find_run(str(resume))
    items = _with_initial_model(items, trust) if checkpoint is None else [_config_of(checkpoint, trust), *items]
    config = configs.read(*items)
    check_training(config.trainer)
    if checkpoint is not None:
        config.optim.initial_weights = None  # the checkpoint's weights replace them
    model, module, datamodule = parts(config)
    if folder is None:
        root = config.trainer.default_root_dir or RUNS
        for key, place in (("run", run), ("trainer.default_root_dir", str(root))):
            if place is not None and "://" in place:
                raise UserError(f"{key}: {place} is a URL, but runs are written to local folders")
        folder = new_run(run, first_name(configs_and_overrides) or "run", Path(root))
    with claimed(folder, new=checkpoint is None, overwrite=overwrite) as trained:
        first_batch = FirstBatch(trained)
        trainer = fitting_trainer(config, folder, [*callbacks, first_batch])
        if trainer.num_nodes > 1 and trainer.is_global_zero:
            Console().print(f"waiting until the run has started on all {trainer.num_nodes} machines", style="dim")
        with errors_explained():
            trainer.fit(module, datamodule=datamodule, ckpt_path=None if checkpoint is None else str(checkpoint))
            if trainer.num_training_batches == 0 and trainer.limit_train_batches:
                raise UserError(f"data: train_dataloader() of {type(datamodule).__name__} has no batches")
            row = next(callback for callback in trainer.callbacks if isinstance(callback, ResultRow))
            row.finish(trainer, module, datamodule)  # completes a run that was killed after its last step
    if module.tokenizer is not None:
        model.writer = partial(write, tokenizer=module.tokenizer, graphs=DecodingGraphs())
    return folder, read_row(folder) or {}, model


@quiet()
def predict(
    configs_and_overrides: Sequence[Item],
    checkpoint: str | Path | None,
    output: str | Path,
    trust: bool,
    callbacks: Sequence[Callback],
) -> Path:
    """Write the loss of every token to a file, and return its path."""
    file, config = _checkpoint_and_config("predict", configs_and_overrides, checkpoint, trust)
    _, module, datamodule = parts(config)
    trainer = evaluating_trainer("limit_predict_batches", config, run_of(file), [*callbacks, Predictions(output)])
    with errors_explained():
        trainer.predict(module, datamodule=datamodule, ckpt_path=str(file), return_predictions=False)
    return Path(output)


@quiet()
def evaluate(
    verb: Literal["validate", "test"],
    items: Sequence[Item],
    checkpoint: str | Path | None,
    trust: bool,
    verbose: bool,
    callbacks: Sequence[Callback],
) -> dict[str, float]:
    """Measure the metrics of a checkpoint on its validation or test data."""
    file, config = _checkpoint_and_config(verb, items, checkpoint, trust)
    _, module, datamodule = parts(config)
    limit = "limit_val_batches" if verb == "validate" else "limit_test_batches"
    trainer = evaluating_trainer(limit, config, run_of(file), callbacks)
    with errors_explained():
        rows = getattr(trainer, verb)(module, datamodule=datamodule, ckpt_path=str(file), verbose=False)
    metrics = {name: value for row in rows for name, value in row.items()}
    if verbose and trainer.is_global_zero:
        Console().print(metrics_table(metrics, run_of(file).name))
        step = f"next: python cli.py evaluate --checkpoint {shlex.quote(str(run_of(file)))} --tasks=list"
        Console().print(step, style="dim", soft_wrap=True)
    return metrics


def _with_initial_model(items: Items, trust: bool) -> Items:
    """The items, behind the model of `optim.initial_weights` if none of them names a stack.

    A file of weights alone has no model; the parser then says that one is missing.

    Raises:
        UserError: The weights do not exist, are damaged, or their model is not trusted.
    """
    path: Any = None
    for item in items:
        if isinstance(item, str):
            key, _, value = item.partition("=")
            path = value if key == "optim.initial_weights" else path
        elif isinstance(section := item.get("optim"), Mapping):
            path = section.get("initial_weights", path)
    if isinstance(path, str) and (remote := on_hub(path)) is not None:
        raise UserError(
            f"optim.initial_weights: {path} is not a local folder; write one by convert --checkpoint {path}, or, if it "
            f"has a config.yaml, by `hf download {remote.repo} --local-dir FOLDER`"
        )
    if any(_names_stack(item) for item in items):
        return items
    if not isinstance(path, str) or path == "null" or path.endswith(".safetensors"):
        return items
    with errors_about("optim.initial_weights"):
        return [{"model": SavedModel.open(path, trust).model_config}, *items]


def _names_stack(item: str | Mapping[str, Any]) -> bool:
    if isinstance(item, str):
        return re.match(r"model\.stack[.=]", item) is not None
    model = item.get("model")
    return isinstance(model, Mapping) and "stack" in model


def _checkpoint_and_config(
    verb: str, items: Sequence[Item], checkpoint: str | Path | None, trust: bool
) -> tuple[Path, Namespace]:
    """The checkpoint to evaluate, and its config with the configs and overrides applied.

    Without `checkpoint`, the first item is the checkpoint, unless it is a config or an override.
    """
    if checkpoint is None and items and _names_checkpoint(items[0]):
        checkpoint, *items = items  # type: ignore[assignment]
    if checkpoint is None:
        raise UserError(f"checkpoint: {verb} needs one, ", Option("checkpoint", "runs/NAME"))
    file, overlays = checkpoint_of(checkpoint), load_items(items)
    base = dict(_config_of(file, trust))
    of_training = {*LIMITS, "logger"}
    base["trainer"] = {key: value for key, value in base.get("trainer", {}).items() if key not in of_training}
    config = configs.read(base, *overlays)
    check_trainer(config.trainer)
    return file, config


def _names_checkpoint(item: Item) -> bool:
    if isinstance(item, Mapping) or is_override(item) or Path(item).suffix in (".yaml", ".yml"):
        return False
    return Path(item).exists() or not (CONFIGS / f"{item}.yaml").is_file()


def _config_of(checkpoint: Path, trust: bool) -> dict[str, Any]:
    """The config that a checkpoint was trained with; a UserError if someone else wrote it and it is not trusted."""
    saved = Checkpoint(checkpoint, trust)
    if not saved.is_trusted:
        unused = "its data, trainer and callbacks would be built (optim.initial_weights takes its model alone)"
        raise not_trusted(checkpoint, unused)
    return saved.config
