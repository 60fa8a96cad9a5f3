"""Training and evaluation with Lightning, behind the functions of `zoo.runs.fit`, which describe the arguments."""

import json
import logging
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback, ModelSummary
from rich.console import Console

import kernels
from kernels import Option, UserError
from zoo import config as configs
from zoo.arguments import check_not_empty, described, errors_about
from zoo.checkpoints.format import check_weights, load_tensors
from zoo.config.find import CONFIGS
from zoo.config.overlays import Item, first_name, is_override, load_items, without
from zoo.config.trainer import LIMITS, check_trainer, check_training
from zoo.data.contract import vocabulary_of
from zoo.data.resumable import ResumableData
from zoo.generation.generate import write
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.lm.size_table import size_table
from zoo.runs.build import evaluating_trainer, fitting_trainer, parts
from zoo.runs.cautions import cautions
from zoo.runs.errors import FirstBatch, errors_explained, quiet
from zoo.runs.folder import RUNS, claimed, find_run, folder_of, new_run, remove_empty, run_of
from zoo.runs.forecast import forecast, show
from zoo.runs.rows import check_rows, device_count, divide_step
from zoo.saved.hub import ON_HUB, hub_model
from zoo.saved.model import Checkpoint, SavedModel, checkpoint_of
from zoo.saved.trust import not_trusted
from zoo.train.callbacks.result_row import ResultRow
from zoo.train.history import read_history
from zoo.train.module import Pretraining
from zoo.train.results import metrics_table, read_row

log = logging.getLogger(__name__)

Items = list[str | dict[str, Any]]  # what `load_items` returns


Links = Callable[[Namespace, L.LightningDataModule], None]  # sets keys of a config by what its data turned out to be


@dataclass(frozen=True)
class Plan:
    """The config and checkpoint of a verb, before anything is built.

    Attributes:
        config: The resolved config.
        checkpoint: The checkpoint to continue from, or to evaluate.
        folder: The run's folder; None names a new one when it is claimed.
        name: What the user calls a new run, and the name of its config.
        overwrite: Whether a new run replaces one of its name.
    """

    config: Namespace
    checkpoint: Path | None
    folder: Path | None
    name: tuple[str | None, str] = (None, "run")
    overwrite: bool = False


@dataclass(frozen=True)
class Session:
    """Model, data and trainer that were built from a plan."""

    plan: Plan
    folder: Path
    model: LanguageModel
    module: Pretraining
    datamodule: L.LightningDataModule
    trainer: L.Trainer

    @contextmanager
    def explained(self) -> Iterator[dict[str, Any]]:
        """Explain errors of the trainer in the block, which passes the arguments on to it."""
        with errors_explained():
            checkpoint = None if self.plan.checkpoint is None else str(self.plan.checkpoint)
            yield {"model": self.module, "datamodule": self.datamodule, "ckpt_path": checkpoint}


def plan_fit(
    configs_and_overrides: Sequence[Item],
    run: str | None,
    resume: str | Path | None,
    overwrite: bool,
    trust: bool,
    others: Collection[str] = (),
) -> Plan:
    """Read the config of a run; nothing is built or written. `others` are top-level keys that are not of a run."""
    if resume is not None and run is not None:
        raise UserError(
            "run: ", Option("run"), " names a new run and ", Option("resume"), " continues one; give one of them"
        )
    if resume is not None and overwrite:
        raise UserError("overwrite: a run that is continued by resume cannot be replaced; give one of them")
    check_not_empty("run", run)
    items = without(load_items(configs_and_overrides), others)
    folder, checkpoint = (None, None) if resume is None else find_run(str(resume))
    if folder is None or checkpoint is None:
        items = _with_initial_model(items, trust)
    else:
        saved = _config_to_resume(checkpoint, trust)  # which says what to do about a damaged checkpoint
        changes = [] if Path(str(resume)).suffix == ".ckpt" else read_history(folder)
        step = Checkpoint(checkpoint, trust).step if changes else 0
        # those with which the run was last resumed from this checkpoint, if it ended before the next
        unsaved = [f"{change.key}={json.dumps(change.new)}" for change in changes if change.step == step]
        items = [saved, *unsaved, *items]
    config = configs.read(*items)
    check_training(config.trainer)
    if checkpoint is not None:
        config.optim.initial_weights = None  # the checkpoint's weights replace them
    return Plan(config, checkpoint, folder, (run, first_name(configs_and_overrides) or "run"), overwrite)


def build_fit(plan: Plan, callbacks: Sequence[Callback], claims: ExitStack, links: Links | None = None) -> Session:
    """Claim the folder of a run, until `claims` is closed, and build the run: data, model, module and trainer."""
    config, folder = plan.config, plan.folder
    if folder is None:
        root = config.trainer.default_root_dir or RUNS
        for key, place in (("run", plan.name[0]), ("trainer.default_root_dir", str(root))):
            if place is not None and "://" in place:
                raise UserError(f"{key}: {place} is a URL, but runs are written to local folders")
        if not (root_folder := Path(root).expanduser()).exists():
            claims.callback(remove_empty, root_folder)
        folder = new_run(*plan.name, Path(root))
    profiled, steps = config.trainer.profiler is not None, config.trainer.max_steps
    if profiled and plan.checkpoint is not None and 0 < steps <= Checkpoint(plan.checkpoint).step:
        config.trainer.profiler = None  # PyTorch's fails if no step is left that it could record
    trained = claims.enter_context(claimed(folder, new=plan.checkpoint is None, overwrite=plan.overwrite))
    devices = device_count(config.trainer)
    divide_step(config, devices)
    model, module, datamodule = parts(config, links)
    if isinstance(datamodule, ResumableData):  # whose batch_size counts the rows of all devices
        check_rows(config, devices)
    trainer = fitting_trainer(config, folder, [*callbacks, FirstBatch(trained)])
    sentences = cautions(config, model.num_parameters(), vocabulary_of(datamodule), devices)
    for sentence in sentences if trainer.is_global_zero else ():
        log.warning("%s", sentence)
    if trainer.num_nodes > 1 and trainer.is_global_zero:
        Console().print(f"waiting until the run has started on all {trainer.num_nodes} machines", style="dim")
    return Session(plan, folder, model, module, datamodule, trainer)


def run_fit(session: Session) -> tuple[Path, dict[str, Any], LanguageModel]:
    """Train; returns the folder of the run, its results, and the model."""
    trainer, module, datamodule = session.trainer, session.module, session.datamodule
    own_summary = any(isinstance(callback, ModelSummary) for callback in trainer.callbacks)
    if trainer.is_global_zero and session.plan.config.trainer.enable_model_summary is not False and not own_summary:
        Console().print(size_table(session.model, module.context_length or 1))
    with session.explained() as arguments:
        try:
            with _kernels_of(session.plan.config):
                trainer.fit(**arguments)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            file = session.plan.checkpoint
            if isinstance(error, UserError) or not module.is_restoring or file is None or Checkpoint(file).is_trusted:
                raise
            raise UserError(
                f"resume: the state of the trainer in {file}, which someone else saved, cannot be restored "
                f"({described(error)}); a new run can start from its weights: optim.initial_weights"
            ) from error
        if trainer.num_training_batches == 0 and trainer.limit_train_batches:
            raise UserError(f"data: train_dataloader() of {type(datamodule).__name__} has no batches")
        row = next(callback for callback in trainer.callbacks if isinstance(callback, ResultRow))
        row.finish(trainer, module, datamodule)  # completes a run that was killed after its last step
    if module.tokenizer is not None:
        session.model.writer = partial(write, tokenizer=module.tokenizer, graphs=DecodingGraphs())
    return session.folder, read_row(session.folder) or {}, session.model


@contextmanager
def _kernels_of(config: Namespace) -> Iterator[None]:
    """Run the ops in the block on the backend and in the mode that a config names, or else in those in force.

    Checkpoints can be continued in others.
    """
    mode = config.deterministic_kernels
    with (
        nullcontext() if config.backend is None else kernels.backend(config.backend),
        nullcontext() if mode is None else kernels.deterministic(mode),
    ):
        yield


def dry_run(plan: Plan, dry: bool, on: str | None) -> tuple[Path, dict[str, Any], LanguageModel]:
    """Print what a run needs; returns the folder that its name means, the numbers, and its model."""
    if not dry:
        raise UserError(f"on: {on} is for an estimate without training; add ", Option("dry_run", True))
    result, model = forecast(plan.config, on)
    if plan.checkpoint is not None:
        saved = Checkpoint(plan.checkpoint)
        module = Pretraining(model, configs.instantiate("optim", plan.config), config=configs.to_dict(plan.config))
        module.check_continued(saved.config, saved.step, plan.config.trainer.max_steps)
        check_weights({f"model.{name}": shape for name, shape in saved.weights.specs.items()}, module, "the checkpoint")
    show(result)
    return plan.folder or folder_of(plan.name[0] or plan.name[1]), result._asdict(), model


def plan_evaluation(
    verb: str,
    configs_and_overrides: Sequence[Item],
    checkpoint: str | Path | None,
    trust: bool,
    others: Collection[str] = (),
) -> Plan:
    """Read the config of a checkpoint to evaluate, with the configs and overrides applied; nothing is built.

    Args:
        verb: The verb, for messages.
        configs_and_overrides: Without `checkpoint`, the first is the checkpoint, unless it is a config or an override.
        checkpoint: The checkpoint.
        trust: Whether to vet nothing.
        others: Top-level keys that are not of a run, which are left out.
    """
    items = configs_and_overrides
    if checkpoint is None and items and _names_checkpoint(items[0]):
        checkpoint, *items = items  # type: ignore[assignment]
    if checkpoint is None:
        raise UserError(f"checkpoint: {verb} needs one, ", Option("checkpoint", "runs/NAME"))
    file, overlays = checkpoint_of(checkpoint), without(load_items(items), others)
    base = dict(_config_of(file, trust))
    of_training = {*LIMITS, "logger"}
    base["trainer"] = {key: value for key, value in base.get("trainer", {}).items() if key not in of_training}
    config = configs.read(base, *overlays)
    check_trainer(config.trainer)
    config.teacher.checkpoint = None  # it has no part in an evaluation
    return Plan(config, file, run_of(file))


def build_evaluation(
    verb: str,
    plan: Plan,
    callbacks: Sequence[Callback],
    links: Links | None = None,
) -> Session:
    """Build what an evaluation needs: data, model, module and trainer."""
    assert plan.folder is not None
    model, module, datamodule = parts(plan.config, links)
    limit = {"validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}[verb]
    trainer = evaluating_trainer(limit, plan.config, plan.folder, callbacks)
    return Session(plan, plan.folder, model, module, datamodule, trainer)


def run_evaluation(verb: Literal["validate", "test"], session: Session, verbose: bool) -> dict[str, float]:
    """Measure the metrics of a checkpoint on its validation or test data."""
    with session.explained() as arguments:
        rows = getattr(session.trainer, verb)(**arguments, verbose=False)
    metrics = {name: value for row in rows for name, value in row.items()}
    if verbose and session.trainer.is_global_zero:
        Console().print(metrics_table(metrics, session.folder.name))
        step = f"next: python cli.py evaluate --checkpoint {shlex.quote(str(session.folder))} --tasks=list"
        Console().print(step, style="dim", soft_wrap=True)
    return metrics


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
    plan = plan_evaluation(verb, items, checkpoint, trust)
    return run_evaluation(verb, build_evaluation(verb, plan, callbacks), verbose)


@quiet()
def saved_losses(config: Namespace, checkpoint: str | Path, trust: bool) -> dict[str, float]:
    """The metrics of any saved model on the validation data of a run's config, on one device."""
    saved, config = SavedModel.open(checkpoint, trust), config.clone()
    config.model, config.teacher.checkpoint, config.optim.initial_weights = saved.parsed.model, None, None
    config.trainer.update(Namespace(devices=1, num_nodes=1, strategy="auto", logger=False))
    config.context_parallel, config.sequence_parts = 1, None
    session = build_evaluation("validate", Plan(config, None, Path(checkpoint)), ())
    load_tensors(session.model, saved.on_meta()[1], saved.path)
    return run_evaluation("validate", session, verbose=False)


def run_prediction(session: Session) -> None:
    """Write the loss of every token to the file of the session's `Predictions`."""
    with session.explained() as arguments:
        session.trainer.predict(**arguments, return_predictions=False)


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
    if isinstance(path, str) and path.startswith(ON_HUB):
        raise UserError(
            f"optim.initial_weights: {path} is not a local folder; write one by convert --checkpoint {path}, or, if it "
            f"has a config.yaml, by `hf download {hub_model(path).repo} --local-dir FOLDER`"
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


def _names_checkpoint(item: Item) -> bool:
    if isinstance(item, Mapping) or is_override(item) or Path(item).suffix in (".yaml", ".yml"):
        return False
    return Path(item).exists() or not (CONFIGS / f"{item}.yaml").is_file()


def _config_to_resume(checkpoint: Path, trust: bool) -> dict[str, Any]:
    """The config in a checkpoint; the error about a damaged one names another checkpoint of the run that is whole."""
    try:
        Checkpoint(checkpoint, trust).config  # noqa: B018 - reads the file
    except UserError as error:
        others = sorted(checkpoint.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
        for other in others:
            with suppress(UserError):
                _config_of(other, trust)
                another = Option("resume", str(other))
                break
        else:
            raise
        raise UserError(str(error).removesuffix("."), "; ", another, " continues from another checkpoint") from error
    return _config_of(checkpoint, trust)


def _config_of(checkpoint: Path, trust: bool) -> dict[str, Any]:
    """The config that a checkpoint was trained with; a UserError if someone else wrote it and it is not trusted."""
    saved = Checkpoint(checkpoint, trust)
    if not saved.is_trusted:
        unused = "its data, trainer and callbacks would be built (optim.initial_weights takes its model alone)"
        raise not_trusted(checkpoint, unused)
    saved.warn_of_changed_sources(saved.config)
    return saved.config
