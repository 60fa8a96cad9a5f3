"""Training and evaluation from Python: the functions behind the verbs of the command line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from kernels import UserError
from zoo import config as configs
from zoo.checkpoints.signature import is_own
from zoo.config.moved import up_to_date
from zoo.config.overlays import Item, first_name, load_items
from zoo.config.trust import user_input, vet_run
from zoo.files.links import check_inside, check_plain_folder
from zoo.lm.model import LanguageModel
from zoo.loading.load import checkpoint_of, described, find, saved
from zoo.runs.assemble import (
    LIMITS,
    evaluating_trainer,
    fitting_trainer,
    lost_processes_explained,
    misconfiguration_explained,
    parts,
)
from zoo.runs.folder import RUNS, claimed, find_run, new_run, run_of
from zoo.runs.initial_model import with_initial_model
from zoo.runs.quiet import quiet
from zoo.runs.restored import Begun, restoration_explained
from zoo.train.callbacks.predictions import Predictions
from zoo.train.callbacks.result_row import ResultRow
from zoo.train.results import metrics_table, read_row
from zoo.train.signals import interruptible


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        folder: The run's folder: config, checkpoints, metrics, samples and curve.
        row: The row of `results.json`; losses are in nats per token.
        model: The trained model in this process. (If ZeRO sharded it, `zoo.load(folder)` gives the whole model.)
    """

    folder: Path
    row: dict[str, Any]
    model: LanguageModel


@quiet()
def fit(
    *configs_and_overrides: Item,
    run: str | None = None,
    resume: str | Path | None = None,
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a model, and write config, checkpoints, metrics, samples, results and loss curve to runs/NAME.

    ``zoo.fit("gdn_h2.yaml", "trainer.max_steps=300").row["val_loss"]``

    Args:
        configs_and_overrides: Configs by path or name in `configs/`, or as mappings, and overrides `key=value`; each
            takes precedence over those before it. Without a model among them it is that of `optim.initial_weights`.
        run: Name of the new run, a folder in `runs/` (or in `trainer.default_root_dir`), or a path if it has a slash.
            Null names it after the config.
        resume: The run to continue, or one of its checkpoints. All configs and overrides are applied on top of its
            config.
        trust: Import, call, read and write what the config of the resumed run, or of the initial weights, names, even
            if someone else wrote it.
        callbacks: Additional Lightning callbacks, beside those in the config's `trainer.callbacks`.

    Raises:
        UserError: A config, key or value is wrong, the folder is in use, or the run diverged.
        KeyboardInterrupt: Ctrl-C stopped the run, which is saved.
    """
    if resume is not None and run is not None:
        raise UserError("run: --run names a new run and --resume continues one; give one of them")
    items = load_items(configs_and_overrides)
    folder, checkpoint = (None, None) if resume is None else find_run(str(resume))
    own = True
    if checkpoint is not None:
        base, own = _config_of(checkpoint, items, trust, continued=folder)
        items = [base, *items]
    else:
        items = with_initial_model(items, trust)
    config = configs.read(*items)
    if checkpoint is not None:
        config.optim.initial_weights = None  # the checkpoint's weights replace them
    model, module, datamodule = parts(config)
    if folder is None:
        root = config.trainer.default_root_dir or RUNS
        for key, place in (("run", run), ("trainer.default_root_dir", str(root))):
            if place is not None and "://" in place:
                raise UserError(f"{key}: {place} is a URL, but runs are written to local folders")
        folder = new_run(run, first_name(configs_and_overrides) or "run", Path(root))
    with claimed(folder, new=checkpoint is None):
        watched = Begun()
        trainer = fitting_trainer(config, folder, [*callbacks, watched])
        if trainer.num_nodes > 1 and trainer.is_global_zero:
            Console().print(f"waiting until the run has started on all {trainer.num_nodes} machines", style="dim")
        with _errors_explained(trainer, None if own else checkpoint, watched):
            trainer.fit(module, datamodule=datamodule, ckpt_path=None if checkpoint is None else str(checkpoint))
            if trainer.num_training_batches == 0 and trainer.limit_train_batches:
                raise UserError(f"data: train_dataloader() of {type(datamodule).__name__} has no batches")
            row = next(callback for callback in trainer.callbacks if isinstance(callback, ResultRow))
            row.finish(trainer, module, datamodule)  # completes a run that was killed after its last step
    return Result(folder, read_row(folder) or {}, model)


def validate(
    *configs_and_overrides: Item,
    checkpoint: str | Path | None = None,
    trust: bool = False,
    verbose: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Measure the loss of a checkpoint on its validation data.

    Args:
        configs_and_overrides: As for `fit`; applied on top of the checkpoint's config.
        checkpoint: A run's folder or a .ckpt file.
        trust: As for `fit`.
        verbose: Whether to print a table.
        callbacks: As for `fit`.

    Returns:
        Metric → value, such as `val_loss` in nats per token.

    Raises:
        UserError: The checkpoint does not exist, or a config, key or value is wrong.
    """
    return _evaluate("validate", configs_and_overrides, checkpoint, trust, verbose, callbacks)


def test(
    *configs_and_overrides: Item,
    checkpoint: str | Path | None = None,
    trust: bool = False,
    verbose: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Measure the loss of a checkpoint on its test data (the validation split, for text).

    Arguments and errors are those of `validate`; the names of the metrics begin with `test_`.
    """
    return _evaluate("test", configs_and_overrides, checkpoint, trust, verbose, callbacks)


@quiet()
def predict(
    *configs_and_overrides: Item,
    checkpoint: str | Path | None = None,
    output: str | Path = "losses.jsonl",
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Write the negative log-likelihood of every token, in nats, to a file of JSON lines.

    Args:
        configs_and_overrides: As for `validate`.
        checkpoint: As for `validate`.
        output: The file to write, which must not exist yet.
        trust: As for `fit`.
        callbacks: As for `fit`.

    Returns:
        The written file.

    Raises:
        UserError: As for `validate`, or the file cannot be written.
    """
    file, config, own = _checkpoint_and_config("predict", configs_and_overrides, checkpoint, trust)
    _, module, datamodule = parts(config)
    watched = Begun()
    trainer = evaluating_trainer(config, run_of(file), [*callbacks, Predictions(output), watched])
    with _errors_explained(trainer, None if own else file, watched):
        trainer.predict(module, datamodule=datamodule, ckpt_path=str(file), return_predictions=False)
    return Path(output)


@quiet()
def _evaluate(
    verb: Literal["validate", "test"],
    items: Sequence[Item],
    checkpoint: str | Path | None,
    trust: bool,
    verbose: bool,
    callbacks: Sequence[Callback],
) -> dict[str, float]:
    file, config, own = _checkpoint_and_config(verb, items, checkpoint, trust)
    _, module, datamodule = parts(config)
    watched = Begun()
    trainer = evaluating_trainer(config, run_of(file), [*callbacks, watched])
    with _errors_explained(trainer, None if own else file, watched):
        rows = getattr(trainer, verb)(module, datamodule=datamodule, ckpt_path=str(file), verbose=False)
    metrics = {name: value for row in rows for name, value in row.items()}
    if verbose and trainer.is_global_zero:
        Console().print(metrics_table(metrics))
    return metrics


@contextmanager
def _errors_explained(trainer: L.Trainer, foreign: Path | None, watched: Begun) -> Iterator[None]:
    """Turn errors of a trainer that are not bugs into a UserError of one sentence, or into KeyboardInterrupt.

    Args:
        trainer: The trainer that runs inside the block.
        foreign: The checkpoint that is restored, if somebody else wrote it.
        watched: A callback of the trainer.
    """
    restored = restoration_explained(foreign, watched)
    with interruptible(), misconfiguration_explained(), restored, lost_processes_explained(trainer):
        yield


def _checkpoint_and_config(
    verb: str, items: Sequence[Item], checkpoint: str | Path | None, trust: bool
) -> tuple[Path, Namespace, bool]:
    """The checkpoint to evaluate, its config with the configs and overrides applied, and whether it is trusted."""
    if checkpoint is None:
        raise UserError(f"checkpoint: {verb} needs one, --checkpoint runs/NAME")
    file, overlays = checkpoint_of(checkpoint), load_items(items)
    base, own = _config_of(file, overlays, trust)
    of_training = {*LIMITS, "logger"}
    base["trainer"] = {key: value for key, value in base.get("trainer", {}).items() if key not in of_training}
    return file, configs.read(base, *overlays), own


def _config_of(
    checkpoint: Path, items: Sequence[str | dict[str, Any]], trust: bool, continued: Path | None = None
) -> tuple[dict[str, Any], bool]:
    """The config that a checkpoint was trained with, vetted unless the user signed it, and whether it is trusted.

    Args:
        checkpoint: The checkpoint.
        items: What the user set.
        trust: Whether to vet nothing.
        continued: The run's folder if it will be written to; that of someone else must have no links in it.
    """
    contents = saved(checkpoint)
    config = up_to_date(contents["config"])
    if trust or is_own(contents["config"], contents.get("signature")):
        return config, True
    if continued is None:
        check_inside(checkpoint, run_of(checkpoint))
    else:
        check_plain_folder(continued)
    vetted = vet_run(config, checkpoint, user_input(items))
    described(find(checkpoint), trust=False)  # compares its sizes with its weights
    return vetted, False
