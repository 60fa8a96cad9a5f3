"""The verb `linearise`: replaces attention of a trained model, and trains the result in stages, each a run of `fit`."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kernels import Option, UserError
from zoo.arguments import check_above_0, check_seed
from zoo.checkpoints.tensor_files import SHARD_BYTES
from zoo.config.overlays import Item, is_override, load_config, load_items
from zoo.display import new_table
from zoo.experiments.commands import config_names
from zoo.experiments.definition import Run
from zoo.experiments.runner import COMMAND, Runner, failed
from zoo.files.links import held_lock
from zoo.files.output import check_output, make_folder
from zoo.files.safe_yaml import dump_yaml
from zoo.runs.training import saved_losses
from zoo.saved.exported_folder import CONFIG, TOKENIZER, ExportedFiles
from zoo.saved.grow.linearise import Linearised, replace_attention, student_config
from zoo.saved.hub import ON_HUB
from zoo.saved.model import SavedModel
from zoo.saved.trust import not_trusted
from zoo.train.history import differences
from zoo.train.results import BITS

ARGUMENTS, STUDENT = "linearise.json", "student"  # in the output, and in it the command


class Distilled(NamedTuple):
    """A student that was trained in stages.

    Attributes:
        folder: The folder of the last stage's run.
        validation: Model → `val_loss` in nats per token and `val_bits_per_byte`, if its tokenizer counts bytes, for the
            teacher, the untrained student, and the student after each stage.
        text: The data of these losses.
    """

    folder: Path
    validation: dict[str, dict[str, float]]
    text: str

    def report(self) -> Table:
        """A table of the losses."""
        bits = ["bits per byte"] if any(BITS in loss for loss in self.validation.values()) else []
        table = new_table(["model", "nats per token", *bits], wrapped=("model",), caption=self.text)
        for name, loss in self.validation.items():
            table.add_row(name, *(f"{loss[key]:.3f}" for key in ("val_loss", BITS) if key in loss))
        return table


def linearise(
    checkpoint: str | Path,
    output: str | Path,
    mixer: str | dict[str, Any],
    keep: str | list[int] = "every:4",
    text: str | None = None,
    tokens: int = 2048,
    seed: int = 0,
    max_shard_size: int = SHARD_BYTES,
    trust: bool = False,
    overwrite: bool = False,
    stages: list[str] | None = None,
    configs: Sequence[Item] = (),
) -> Linearised | Distilled:
    """Replace attention layers of a trained model by a mixer with a matrix state, and train the result in stages.

    Queries, keys, values and outputs start from those of attention; gates and decays start as they do in a new model.
    Each stage starts from the result of the one before it, with the checkpoint as its teacher. The same call again
    skips complete stages and resumes one that was stopped.

    Args:
        checkpoint: A run's folder, a .ckpt file, an exported or a public folder, or hf://owner/name on the Hub.
        output: The folder to write; `load`, `evaluate` and `optim.initial_weights` take it. With stages, it holds the
            untrained model in `student`, and the run of each stage.
        mixer: The name of a mixer, which gets heads as attention has them, or `{class_path: …, init_args: {…}}`.
        keep: The attention layers that stay: `every:4` is the fourth of every four, `[3,7]` is a list, `[]` is none,
            and `auto:3` is the three whose replacement alone increases the loss most.
        text: A text file on which the loss is computed before any training; null for held-out text of the embedded
            corpus.
        tokens: How many tokens of it are read, at most.
        seed: Seed of new weights.
        max_shard_size: Bytes of a file with weights, at most; larger models are divided.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        overwrite: Whether to replace a model that was exported there; other files in the folder stay.
        stages: Configs of the stages, on top of the student's, such as `[train/distil_layers.yaml,
            train/distil_logits.yaml,train/next_token.yaml]`; null trains nothing.
        configs: Configs and overrides `key=value` of all stages: configs come before that of a stage, overrides after.

    Returns:
        Without stages the folder, the layers, what was carried over, and the losses before any training; with stages
        the validation losses of the teacher and of the student before and after each stage.

    Raises:
        UserError: The model does not exist or is damaged, has no attention to replace, the mixer has no matrix state or
            other heads, a layer does not exist, or the folder holds something else, such as stages of another call; a
            stage's config is wrong or sets the teacher, or a stage failed.
    """
    folder, checkpoint = _as_named(output), checkpoint if str(checkpoint).startswith(ON_HUB) else _as_named(checkpoint)
    check_seed(seed)
    check_above_0("tokens", tokens)
    arguments: dict[str, Any] = {"mixer": mixer, "keep": keep, "text": text, "tokens": tokens, "seed": seed}
    if not stages:
        if configs:
            raise UserError(
                f"config: {configs[0]} is for the stages of a training, and none is named; add ",
                Option("stages", "[train/distil_layers.yaml,train/distil_logits.yaml]"),
            )
        check_output(folder, "an exported model", overwrite, checkpoint)
        saved = SavedModel.open(checkpoint, trust)
        return replace_attention(saved, folder, **arguments, max_shard_size=max_shard_size)
    if overwrite:
        raise UserError(f"overwrite: stages continue what is in the output; delete {folder}, or choose another output")
    student, names = folder / STUDENT, config_names(stages)
    if STUDENT in names:
        raise UserError(
            f"stages: {STUDENT} is the folder of the untrained model; give the config of the stage another name"
        )
    overlays = [item if isinstance(item, str) else dump_yaml(load_config(item), one_line=True) for item in configs]
    load_items([*overlays, *stages])  # for the errors of files that do not exist
    parts = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # nothing, or what a call leaves that was killed while it wrote the student
    unfinished = all(name == ".lock" or name.startswith(f".{STUDENT}.") for name in parts)
    if folder.is_symlink() or not (STUDENT in parts or unfinished):
        check_output(folder, "an exported model", overwrite, checkpoint)
    saved = SavedModel.open(checkpoint, trust)
    if not saved.is_trusted and saved.config.keys() != {"model"}:
        raise not_trusted(checkpoint, "each stage would build its data, trainer and callbacks")
    command = json.loads(json.dumps({"output": str(folder), "checkpoint": saved.identity, **arguments}))
    named = dict(zip(names, stages, strict=True))
    if not student.exists():  # mistakes in stages, before anything is written
        config = student_config(saved, mixer, keep)
        _runs(folder, dump_yaml(config, one_line=True), str(checkpoint), named, overlays)
    make_folder(folder, "output")
    with held_lock(folder / ".lock", f"output: {folder} is in use by another process; wait for it or choose another"):
        try:
            if not student.exists():
                for left in folder.glob(f".{STUDENT}.*"):  # by a killed process
                    shutil.rmtree(left)
                files = {ARGUMENTS: json.dumps(command, indent=1)}
                made = replace_attention(saved, student, **arguments, max_shard_size=max_shard_size, files=files)
                Console().print(made.report())
            _check_command(student, command)
            runs = _runs(folder, str(student / CONFIG), str(checkpoint), named, overlays)
        finally:
            if not student.exists():  # nothing was written
                (folder / ".lock").unlink()
                with suppress(OSError):
                    folder.rmdir()
    if failures := Runner(COMMAND, folder, jobs=1, chain=True, option="output").run(runs):
        raise failed(failures, len(runs))
    last = runs[-1].read()
    validation = {
        name: saved_losses(last, path, trust)
        for name, path in {"teacher": checkpoint, "untrained": student, **{n: folder / n for n in names}}.items()
    }
    length = getattr(last.data.init_args, "sequence_length", None)
    rows = "" if length is None else f", {length} tokens a row"
    return Distilled(folder / names[-1], validation, f"validation data of {names[-1]}{rows}")


def _as_named(path: str | Path) -> Path:
    """Return a path as the configs of the stages hold it: relative if it lies in the working folder."""
    named, here = Path(path).expanduser(), Path.cwd()
    return named.relative_to(here) if named.is_absolute() and named.is_relative_to(here) else named


def _check_command(student: Path, command: Mapping[str, Any]) -> None:
    """Raise a UserError if a student was made by another command."""
    file, damaged = student / ARGUMENTS, f"output: {student} was not written by linearise with stages; choose another"
    if not file.is_file():
        raise UserError(damaged)
    try:
        before = json.loads(ExportedFiles(student).read(ARGUMENTS))
    except ValueError:
        raise UserError(damaged) from None
    if (place := before.get("output", command["output"])) != command["output"]:
        raise UserError(
            f"output: {student.parent} was written as {place}, the path by which its stages find it; move it back, or "
            "choose another output"
        )
    for key, then, now in differences({**before, "output": command["output"]}, command):
        change = "has changed since" if key == "checkpoint" else f"was {then}, and now it is {now}"
        raise UserError(
            f"output: {student} was made by another command, whose {key} {change}; delete {student.parent}, or choose "
            "another output"
        )


def _runs(folder: Path, source: str, teacher: str, stages: Mapping[str, str], overlays: Sequence[str]) -> list[Run]:
    """The run of each stage, name → config, on top of the `source` of the student's config, checked."""
    student, runs = folder / STUDENT, list[Run]()
    tokenizer = [f"data.tokenizer={student / TOKENIZER}"] if (student / TOKENIZER).is_file() else []
    overrides = [item for item in overlays if is_override(item)]
    shared = [item for item in overlays if item not in overrides]
    for name, stage in stages.items():
        start = str(folder / runs[-1].name if runs else student)
        own = {"teacher.checkpoint": teacher, "optim.initial_weights": start}
        base = [source, *(f"{key}={value}" for key, value in own.items()), *tokenizer]
        run = Run(name, (*base, *shared, stage, *overrides))
        config = run.check()
        for key, value in own.items():
            if config[key] != value and (key, config[key]) != ("teacher.checkpoint", None):
                raise UserError(f"stages: {stage} sets {key} to {config[key]}, but it is {value}; leave it out")
        runs.append(run)
    return runs
