"""Training and evaluation from Python: the functions behind the verbs of the command line.

They import what trains when they are called, since that is Lightning, which takes three times as long as PyTorch. So
the types of their arguments, which the command line reads, cannot be Lightning's: `callbacks` are its Callbacks.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.config.overlays import Item
from zoo.display import as_html
from zoo.lm.model import LanguageModel


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
    model: LanguageModel = field(repr=False)

    def _repr_html_(self) -> str:
        """The table of losses and the loss curve, for notebooks."""
        from zoo.train.results import result_table

        complete = "val_loss_by_position" in self.row
        return as_html(result_table(self.row) if complete else None, self.folder / "loss.png")


def fit(
    *configs_and_overrides: Item,
    run: str | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
    dry_run: bool = False,
    on: str | None = None,
    callbacks: Sequence[Any] = (),
) -> Result:
    """Train a model, and write config, checkpoints, metrics, samples, results and loss curve to runs/NAME.

    ``zoo.fit("gdn_h2.yaml", "trainer.max_steps=300").row["val_loss"]``

    Args:
        configs_and_overrides: Configs by path or name in `configs/`, or as mappings, and overrides `key=value`; each
            takes precedence over those before it. Without a model among them it is that of `optim.initial_weights`.
        run: Name of the new run, a folder in `runs/` (or in `trainer.default_root_dir`), such as `first` or
            `tests/first`; or a path that begins with `/`, `./`, `../`, `~` or `runs/`. Null names it after the config.
        resume: The run to continue, or one of its checkpoints. All configs and overrides are applied on top of its
            config.
        overwrite: Whether a new run replaces a run of the same name, which is removed after the first batch.
        trust: Import, call, read and write what the config of the resumed run, or of the initial weights, names, even
            if someone else wrote it.
        dry_run: Only print what the run needs: parameters, tokens, FLOPs, memory of a GPU, hours, disk. It needs no GPU
            and no data. `row` are these numbers, and `model` is on the meta device.
        on: GPUs for the dry run, such as `8xH100`.
        callbacks: Lightning callbacks, in addition to those in the config's `trainer.callbacks`.

    Raises:
        UserError: A config, key or value is wrong, the folder is in use, or the run diverged.
        KeyboardInterrupt: Ctrl-C stopped the run, which is saved.
    """
    from zoo.runs import training

    with training.quiet(), ExitStack() as claims:
        plan = training.plan_fit(configs_and_overrides, run, resume, overwrite, trust)
        if dry_run or on is not None:
            return Result(*training.dry_run(plan, dry_run, on))
        return Result(*training.run_fit(training.build_fit(plan, callbacks, claims)))


def validate(
    *configs_and_overrides: Item,
    checkpoint: str | Path | None = None,
    trust: bool = False,
    verbose: bool = True,
    callbacks: Sequence[Any] = (),
) -> dict[str, float]:
    """Measure the loss of a checkpoint on its validation data.

    Args:
        configs_and_overrides: As for `fit`; applied on top of the checkpoint's config. In Python, the first may be the
            checkpoint instead: ``zoo.validate("runs/first")``.
        checkpoint: A run's folder or a .ckpt file.
        trust: As for `fit`.
        verbose: Whether to print a table.
        callbacks: As for `fit`.

    Returns:
        Metric → value, such as `val_loss` in nats per token.

    Raises:
        UserError: The checkpoint does not exist, or a config, key or value is wrong.
    """
    from zoo.runs import training

    return training.evaluate("validate", configs_and_overrides, checkpoint, trust, verbose, callbacks)


def test(
    *configs_and_overrides: Item,
    checkpoint: str | Path | None = None,
    trust: bool = False,
    verbose: bool = True,
    callbacks: Sequence[Any] = (),
) -> dict[str, float]:
    """Measure the loss of a checkpoint on its test data (of text, those of `data.test_fraction`).

    Arguments and errors are those of `validate`; the names of the metrics begin with `test_`.
    """
    from zoo.runs import training

    return training.evaluate("test", configs_and_overrides, checkpoint, trust, verbose, callbacks)


def predict(
    *configs_and_overrides: Item,
    checkpoint: str | Path | None = None,
    output: str | Path = "losses.jsonl",
    trust: bool = False,
    callbacks: Sequence[Any] = (),
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
    from zoo.runs import training
    from zoo.train.callbacks.predictions import Predictions

    with training.quiet():
        plan = training.plan_evaluation("predict", configs_and_overrides, checkpoint, trust)
        training.run_prediction(training.build_evaluation("predict", plan, [*callbacks, Predictions(output)]))
    return Path(output)
