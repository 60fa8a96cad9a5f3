"""`zoo.evaluate`: what saved models can do."""

import glob
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernels import Option, UserError
from mixers.arguments import check_sizes
from zoo.arguments import check_names, check_seed, names_in
from zoo.display import new_console, progress_bar
from zoo.evaluation.loaded import LoadedModel, load_subject
from zoo.evaluation.record import Records, key_of, locked
from zoo.evaluation.results import (
    OVERVIEW,
    check_pictures,
    overview,
    overview_picture,
    pictures,
    table,
    write_pictures,
)
from zoo.evaluation.task import Cell, Options, Row, Task
from zoo.evaluation.tasks import task_table, tasks_of
from zoo.evaluation.tasks.needle_task import NeedleTask
from zoo.evaluation.tasks.token_tasks import TokenEvaluation
from zoo.performance.device import described, version
from zoo.train.devices import pick_device

PRECISIONS = ("32-true", "bf16-mixed")
_SEED = re.compile(r",seed=\d+$")  # as sweeps name their runs
PLACES = ("lengths", "depths", "held_out")  # the options that are in a task's cells


def evaluate(
    checkpoint: list[str] | str | Path | None = None,
    tasks: list[str] | str | None = None,
    lengths: list[int] | int | None = None,
    samples: int | None = None,
    depths: list[float] | float | None = None,
    seed: int = 0,
    haystack: str | None = None,
    data: str | None = None,
    held_out: float | None = None,
    output: str | Path | None = None,
    device: str | None = None,
    precision: str | None = None,
    batch_tokens: int | None = None,
    cuda_graph: bool = True,
    trust: bool = False,
    average_seeds: bool = False,
    verbose: bool = True,
) -> list[Row]:
    """Measure what saved models can do, side by side.

    ``zoo.evaluate("runs/first", "s_niah_1,passkey", lengths=[256, 512], samples=50)``

    Each measured cell is kept in the output folder, so an interrupted evaluation continues where it stopped.

    Args:
        checkpoint: Runs' folders, .ckpt files, exported folders or public ones that `convert` reads, also on the
            Hub (hf://owner/name): one, a list (on the command line, repeat it), or a pattern such as `runs/sweep/*`.
        tasks: Names of tasks, as a list or separated by commas. `list` shows all of them. Or dotted paths of your own
            subclasses of `zoo.evaluation.task.Task`.
        lengths: Lengths in tokens; null for each task's own.
        samples: Samples per cell; null for each task's own.
        depths: Places of the needle, from 0 to 1, for a grid of depth and length; null: spread over all places.
        seed: Seed of all samples.
        haystack: Text to hide needles in and to measure perplexity on, as `data.path`; null: the embedded corpus.
        data: The folder with the files of tasks that need data; `hub` lets lm-eval download them.
        held_out: Fraction of the haystack's documents that perplexity is measured on; 1 for all of a text that the
            models have not read, null for the 0.05 that `fit` holds out by default.
        output: The folder for rows.jsonl and pictures; null: evaluations/NAME, after the checkpoints.
        device: cpu or cuda; null for the GPU if available.
        precision: 32-true or bf16-mixed; null for bf16-mixed on a GPU and 32-true on a CPU.
        batch_tokens: Tokens in a batch of sequences; null for 16,384 on a CPU and 262,144 on a GPU.
        cuda_graph: Capture decoding steps as CUDA graphs, on a GPU.
        trust: Import and call what a model's config names, even if someone else wrote it.
        average_seeds: Show runs of a sweep whose names differ in `seed=` only as one model, with their mean.
        verbose: Whether to print tables and a progress bar.

    Returns:
        Rows of every run, with `model`, `task`, the entries of the cell, `metric` and `value`; means also have `count`,
        `low` and `high`, a 95 % interval.

    Raises:
        UserError: A checkpoint or task does not exist or does not fit, or the output folder has other files of the
            same names; nothing has run then.
        KeyboardInterrupt: Ctrl-C; what was measured is kept.
    """
    if tasks is None:
        raise UserError(
            "tasks: evaluate needs some, such as ",
            Option("tasks", "s_niah_1,passkey"),
            "; ",
            Option("tasks", "list"),
            " shows all of them",
        )
    names = [name for item in ([tasks] if isinstance(tasks, str) else tasks) for name in names_in(item)]
    console = new_console(verbose)
    if names == ["list"]:
        console.print(task_table())
        return []
    if not names:
        raise UserError("tasks: the list is empty; ", Option("tasks", "list"), " shows all of them")
    check_seed(seed)
    options = Options(_tuple(lengths), samples, _tuple(depths), seed, haystack, data, held_out)
    chosen, paths = tasks_of(names, options), _paths(checkpoint)
    if not paths:
        raise UserError("checkpoint: evaluate needs one, ", Option("checkpoint", "runs/NAME"))
    where = pick_device(device)
    check_names("precision", [] if precision is None else [precision], PRECISIONS)
    on_gpu = where.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    bf16 = on_gpu if precision is None else precision == "bf16-mixed"
    check_sizes({"batch_tokens": batch_tokens})
    subjects = [
        load_subject(path, name, bf16, batch_tokens, trust, cuda_graph)
        for path, name in zip(paths, _names(paths), strict=True)
    ]
    plan = [(subject, task, cell) for task in chosen for subject in subjects for cell in _cells(task, subject, where)]
    folder = Path(output) if output is not None else Path("evaluations") / _joined(_names(paths))
    check_pictures(chosen, folder)
    with locked(folder):
        records = Records(folder)
        rows = _measure(plan, records, where, verbose)
        shown = [{**row, "model": _SEED.sub("", row["model"])} for row in rows] if average_seeds else rows
        for task in chosen:
            of_task = [row for row in shown if row["task"] == task.name]
            console.print(f"{task.name}: {task.measures}", table(task, of_task), sep="\n", highlight=False)
            write_pictures(pictures(task, of_task), folder)
            untaught, hint = list[str](), ""
            if isinstance(task, NeedleTask):
                untaught = [subject.name for subject in subjects if subject.saw_no_needles]
                hint = "trained on text without needles, which teaches no recall; train with --config data/needles.yaml"
            elif isinstance(task, TokenEvaluation):
                untaught = [subject.name for subject in subjects if subject.tokenizer is not None]
                hint = (
                    f"trained on text, so that the random tokens of {task.name} mean nothing to it; train on the task"
                )
            if untaught:
                console.print(f"{', '.join(untaught)}: {hint}", style="yellow", highlight=False)
        if len(chosen) > 1 and len(subjects) > 1:
            console.print(OVERVIEW, overview(chosen, shown), sep="\n", highlight=False)
            if (picture := overview_picture(chosen, shown)) is not None:
                write_pictures({OVERVIEW: picture}, folder)
    console.print(f"{folder}/{records.file.name}", style="dim")
    return rows


def _measure(
    plan: Sequence[tuple[LoadedModel, Task, Cell]], records: Records, where: torch.device, verbose: bool
) -> list[Row]:
    """All rows of a plan, measured unless they are on record."""
    about = {**described(where), "zoo": version("token-mixer-zoo")}
    rows: list[Row] = []
    bar = progress_bar(plan, desc="evaluation", unit=" cells", disable=not verbose)
    for number, (subject, task, cell) in enumerate(bar):
        place = " ".join(f"{name}={value}" for name, value in cell.items())
        bar.set_description_str(f"{subject.name} {task.name} {place}")
        what = {
            "task": task.name,
            "cell": cell,
            # lengths and depths are in the cells, so that adding one does not measure the others again
            "options": {name: value for name, value in asdict(task.options).items() if name not in PLACES},
            "sources": task.sources(cell),
            "checkpoint_xxh3_128": subject.identity["checkpoint_xxh3_128"],
            "model": key_of({"model": subject.identity["model"]}),
            "precision": "bf16-mixed" if subject.bf16 else "32-true",
            **({"version": task.version} if task.version > 1 else {}),
        }
        if (measured := records.find(what)) is None:
            subject.to(where)
            start = time.perf_counter()
            measured = task.run(subject, cell)
            seconds = round(time.perf_counter() - start, 3)
            records.add(what, measured, {**about, "seconds": seconds, **subject.identity})
        rows += [{"model": subject.name, "task": task.name, **row} for row in measured]
        following = plan[number + 1] if number + 1 < len(plan) else None
        if following is None or following[:2] != (subject, task):
            own = [row for row in rows if row["model"] == subject.name and row["task"] == task.name]
            rows += [{"model": subject.name, "task": task.name, **row} for row in task.summary(own)]
            if following is None or following[0] is not subject:
                subject.to("cpu")
    return rows


def _cells(task: Task, subject: LoadedModel, where: torch.device) -> list[Cell]:
    """A task's cells for a model, if its state fits into memory at each length."""
    cells = task.cells(subject)
    free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else None
    for length in sorted({cell["length"] for cell in cells if "length" in cell}):
        size = subject.state_size(length) * (2 if subject.bf16 else 4)
        if free is not None and size > free:
            raise UserError(
                f"lengths: after {length} tokens the state of {subject.name} takes {size / 2**30:.1f} GiB for one "
                f"sequence, and {where} has {free / 2**30:.1f} GiB free"
            )
    return cells


def _names(paths: Sequence[str]) -> list[str]:
    """Short names: that of the folder, unless two are the same."""
    short = [Path(path).name if Path(path).suffix != ".ckpt" else Path(path).stem for path in paths]
    return short if len(set(short)) == len(short) else [path.replace("/", "_") for path in paths]


def _paths(checkpoint: list[str] | str | Path | None) -> list[str]:
    """The named checkpoints; a pattern such as `runs/sweep/*` names all that it matches."""
    named = [] if checkpoint is None else [checkpoint] if isinstance(checkpoint, str | Path) else checkpoint
    paths: list[str] = []
    for path in map(str, named):
        matching = sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]
        if not matching:
            raise UserError(f"checkpoint: nothing matches {path}")
        paths += matching
    return list(dict.fromkeys(paths))


def _joined(names: Sequence[str]) -> str:
    """A folder's name for an evaluation of these models; file systems allow 255 bytes."""
    together = "+".join(names)
    return together if len(together) <= 100 else f"{names[0][:80]}+{len(names) - 1}-more"


def _tuple(values: Sequence[Any] | float | None) -> tuple[Any, ...] | None:
    return None if values is None else (values,) if isinstance(values, int | float) else tuple(values)
