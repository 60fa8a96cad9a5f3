"""Train the runs of sweeps, several at a time on each GPU, and add a row to a CSV for each run that completes.

    PYTHONPATH=. python reproductions/sweep_rows.py sweep/expansion_recall.yaml --jobs=24 --minutes=7

The order is that of the sweeps: all cells of a seed and a learning rate, then the next rate, then the next seed. So a
table that ends early can compare cells. Runs with a row in the table are skipped. Only the tables need to travel
between machines that are available for minutes, whereas `cli.py sweep` recognises complete runs by their folders.
Overrides `key=value` follow the names of sweeps, of the sweeps' keys (`seeds=[3,4]`) or for all runs. `--with` names a
config for all runs, and `--only` chooses cells. Ctrl-C stops the runs as it stops `fit`; the same command continues.

`--evaluate="--tasks=passkey --lengths=[1024,2048]"`, which can be repeated, evaluates each complete run where it was
trained, with options of `cli.py evaluate`. The numbers go to a second table, such as runs/sweep_rows.evaluations.csv,
with a row for each metric of a task and length. A run without them is evaluated if its folder exists, and trained again
otherwise.
"""

import argparse
import json
import math
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kernels import UserError
from reproductions.write_csv import flat, read, training_curve, write
from zoo.config.overlays import is_override, load_items
from zoo.evaluation.record import FILE, key_of
from zoo.experiments.commands import FIELDS, read_sweep
from zoo.experiments.definition import Run, Sweep, with_capacity
from zoo.experiments.runner import COMMAND, Runner, result
from zoo.train.metrics_file import read_metrics
from zoo.train.signals import PARENT, sigterm_raises

CURVES = {
    "step": "val_steps",
    "val_loss": "val_losses",
    "val_accuracy": "val_accuracies",
}  # at each validation, which show whether a run has converged
KEY = ("sweep", "name", "overrides")
NUMBERS = (
    *("steps", "tokens_seen", "parameters", "state_size", "val_loss", "val_loss_by_task", "val_accuracy"),
    *("val_accuracy_by_task", "pairs_at_50", "pairs_at_90", "wall_seconds", "precision", "torch", "device"),
    *("data_hash", "commit"),
)
OF_LAWS = ("mixers", "parameters_without_embeddings", "training_flops_per_token", "context_length")


class Processes:
    """The processes of runs, which can be stopped as Ctrl-C stops them."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopped, self._lock = False, threading.Lock()

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a command to its end, and return its exit code, which is that of Ctrl-C if all were stopped before."""
        with log.open("ab") as output:
            with self._lock:
                if self._stopped:
                    return 128 + signal.SIGINT
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # so that Ctrl-C reaches it once, through this process
                )
                self._running.append(process)
            code = process.wait()
            self._running.remove(process)
        return code

    def stop(self) -> None:
        """Interrupt all processes, and let none start any more."""
        with self._lock:
            self._stopped = True
            for process in [*self._running]:
                process.send_signal(signal.SIGINT)


class Rows:
    """Trains and evaluates runs, each into a row of a table and its evaluations into rows of another.

    Args:
        table: The CSV.
        sweep: Name of the sweep.
        overrides: The overrides of all runs, for the table.
        runner: Starts the runs.
        commit: The commit for the table where the code is not in a checkout.
        evaluations: Options of `cli.py evaluate`, for each evaluation.
        delete: Whether the folder of a run is deleted after its rows are written.
        curves: Whether rows have the training losses and all else that `scaling fit` reads.
    """

    lock = threading.Lock()  # of the tables, which several sweeps may share

    def __init__(
        self,
        table: Path,
        sweep: str,
        overrides: Sequence[str],
        runner: Runner,
        commit: str | None,
        *,
        evaluations: Sequence[str] = (),
        delete: bool = False,
        curves: bool = False,
    ):
        self.table, self.sweep, self.overrides = table, sweep, " ".join(overrides)
        self.runner, self.commit, self.evaluations = runner, commit, evaluations
        self.delete, self.curves = delete, curves
        self.second = table.with_suffix(".evaluations.csv")

    def key(self, run: Run) -> tuple[str, str, str]:
        """The values that identify the row of a run."""
        return self.sweep, run.name, self.overrides

    def done(self) -> set[tuple[str, ...]]:
        """The keys of all runs that have a row, and rows of each evaluation."""
        done = {_key(row) for row in read(self.table)}
        rows = read(self.second) if self.evaluations else []
        for evaluation in self.evaluations:
            done &= {_key(row) for row in rows if row["evaluation"] == evaluation}
        return done

    def complete(self, run: Run, gpu: str | None, threads: int, processes: "Processes") -> str:
        """Train and evaluate a run, and write its rows; return a line about it."""
        folder = self.runner.folder / run.name
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        log = folder.with_name(f"{run.name}.log")
        if result(folder) is None:
            code = processes.run(self.runner.prepare(run), environment, log)
            if result(folder) is None:
                return f"{run.name} ended without a result (exit code {code}), see {log}"
        for evaluation in self.evaluations:
            options = [f"--checkpoint={folder}", f"--output={_output(folder, evaluation)}", "--verbose=false"]
            command = [*self.runner.command, "evaluate", *shlex.split(evaluation), *options]
            if code := processes.run(command, environment, log):
                return f"{run.name} was not evaluated (exit code {code}), see {log}"
        row, key = self.row(run, folder), self.key(run)
        with self.lock:
            if self.evaluations:
                kept = [r for r in read(self.second) if _key(r) != key or r["evaluation"] not in self.evaluations]
                write([*kept, *self.evaluated(row, folder)], self.second)
            write([*(r for r in read(self.table) if _key(r) != key), row], self.table)
        if self.delete:
            shutil.rmtree(folder)
        return f"{run.name}: loss {row['val_loss']}, accuracy {row.get('val_accuracy')}, {row['wall_seconds']} s"

    def row(self, run: Run, folder: Path) -> dict[str, Any]:
        """The row of a complete run."""
        complete = result(folder)
        assert complete is not None
        numbers = with_capacity(complete)
        numbers |= {"commit": numbers.get("commit") or self.commit}
        names = (*NUMBERS, *(OF_LAWS if self.curves else ()))
        columns = {name: numbers[name] for name in names if name in numbers}
        validated = [metrics for metrics in read_metrics(folder / "metrics.jsonl") if "val_loss" in metrics]
        curves: dict[str, Any] = {
            column: [metrics.get(name) for metrics in validated] for name, column in CURVES.items()
        }
        if self.curves:
            curves |= training_curve(folder, complete)
        cell = ", ".join(label for _, label in run.cell)
        about = {"cell": cell, "learning_rate": run.learning_rate or complete["learning_rate"], "seed": run.seed}
        return dict(zip(KEY, self.key(run), strict=True)) | about | dict(flat(columns | curves, ""))

    def evaluated(self, row: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
        """The rows of the evaluations of a run that has a row, with `metric`, `value`, and entries such as `length`."""
        names = {name: row[name] for name in (*KEY, "cell", "learning_rate", "seed")}
        for evaluation in self.evaluations:
            for line in (_output(folder, evaluation) / FILE).read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                about = {"evaluation": evaluation, "seconds": record["seconds"], "task": record["what"]["task"]}
                about |= {"haystack": record["what"]["options"]["haystack"]}
                yield from (names | about | measured for measured in record["rows"])


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _output(folder: Path, evaluation: str) -> Path:
    """The folder of an evaluation of a run."""
    return folder / f"evaluation-{key_of({'options': evaluation})}"


def jobs_of(sweeps: Sequence[str], overrides: Sequence[str], args: argparse.Namespace) -> list[tuple[Rows, Run]]:
    """The runs that have no row yet, in the order of seeds, learning rates and cells."""
    settings = [override for override in overrides if override.partition("=")[0] in FIELDS]
    overrides = [*args.with_configs, *(override for override in overrides if override not in settings)]
    jobs = []
    for name in sweeps:
        runner = Runner(COMMAND, args.folder / Path(name).stem)
        about = {"evaluations": args.evaluate, "delete": args.delete, "curves": args.curves}
        rows = Rows(args.table, Path(name).stem, overrides, runner, args.commit, **about)
        done = rows.done()
        sweep = read_sweep(load_items([name, *settings]))
        runs = [run for run in sweep.runs(tuple(overrides)) if all(_has_label(run, only) for only in args.only)]
        if not runs:
            raise UserError(f"--only: no cell of {name} has the labels {' and '.join(args.only)}")
        rows.runner.folder.mkdir(parents=True, exist_ok=True)
        with rows.runner.claimed(runs):  # complains about folders of other configs
            jobs += [
                (run.seed or 0, _place(run, sweep), (rows, run))
                for run in (runs if not args.chosen_on else _chosen(runs, sweep, rows, args.chosen_on, args.chosen_in))
                if rows.key(run) not in done
            ]
    return [job for *_, job in sorted(jobs, key=lambda job: job[:2])]


def _has_label(run: Run, labels: str) -> bool:
    """Whether the cell of a run has one of the labels, which "|" separates."""
    return any(label in labels.split("|") for _, label in run.cell)


def _place(run: Run, sweep: Sweep) -> int:
    """The place of a run's learning rate among those of its sweep."""
    return 0 if run.learning_rate is None else sweep.learning_rates.index(run.learning_rate)


def _chosen(runs: Sequence[Run], sweep: Sweep, rows: Rows, seeds: Sequence[int], label: str | None) -> list[Run]:
    """The runs of some seeds, and those of other seeds at the rate that is best on these, once they all have a row.

    With a label, only the cells that have it (and controls) are run on these seeds. Each chooses the rate of all cells
    that differ from it in the axis of the label alone.
    """
    axes = {axis for run in runs for axis, of_cell in run.cell if of_cell == label}
    if label is not None and not axes:
        raise UserError(f"--chosen-in: no cell has the label {label}")
    choosing = [
        run for run in runs if run.seed in seeds and all(of_cell == label for axis, of_cell in run.cell if axis in axes)
    ]
    table = {_key(row): row for row in read(rows.table)}
    scores: dict[Any, dict[float | None, list[float]]] = {}
    for run in choosing:
        value = table.get(rows.key(run), {}).get(sweep.metric)
        scores.setdefault(_without(run, axes), {}).setdefault(run.learning_rate, []).append(float(value or "nan"))
    best = {}
    for cells, rates in scores.items():
        means = {rate: sum(values) / len(values) for rate, values in rates.items()}
        if not any(math.isnan(mean) for mean in means.values()):
            best[cells] = (max if sweep.mode == "max" else min)(means, key=means.__getitem__)
    others = [run for run in runs if run.seed not in seeds and _without(run, axes) in best]
    return choosing + [run for run in others if run.learning_rate == best[_without(run, axes)]]


def _without(run: Run, axes: Set[str]) -> tuple[tuple[str, str], ...]:
    """The cell of a run without some axes."""
    return tuple(place for place in run.cell if place[0] not in axes)


def work(jobs: Sequence[tuple[Rows, Run]], at_once: int, gpus: Sequence[str | None], minutes: float) -> int:
    """Train runs, so many at a time, until none may start any more; return how many are left."""
    slots: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for number in range(at_once):
        slots.put(gpus[number % len(gpus)])
    latest, threads, count = time.monotonic() + 60 * minutes, max((os.cpu_count() or 1) // at_once, 1), len(jobs)
    processes = Processes()

    def one(job: tuple[Rows, Run]) -> bool:
        if time.monotonic() > latest:
            return False
        gpu = slots.get()
        try:
            tqdm.write(f"{time.strftime('%H:%M:%S')} {job[0].complete(job[1], gpu, threads, processes)}")
        finally:
            slots.put(gpu)
        return job[0].key(job[1]) in job[0].done()

    pool = ThreadPoolExecutor(at_once)
    try:
        with sigterm_raises():
            return count - sum(pool.map(one, jobs))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        processes.stop()  # none is left, but after Ctrl-C or SIGTERM
        pool.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, or these arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="sweeps and overrides key=value")
    parser.add_argument("--table", type=Path, default=Path("runs/sweep_rows.csv"))
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep_rows"), help="of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on all GPUs together")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run starts")
    parser.add_argument(
        "--chosen-on",
        type=lambda text: [int(seed) for seed in text.split(",")],
        help="seeds whose runs choose the learning rate of a cell; the other seeds are run at that rate only",
    )
    parser.add_argument(
        "--chosen-in",
        metavar="LABEL",
        help="cells with this label choose, also for the cells that differ from them in its axis alone",
    )
    parser.add_argument(
        "--with", dest="with_configs", action="append", default=[], metavar="CONFIG", help="for all runs"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LABEL|LABEL", help="cells with one of these labels"
    )
    parser.add_argument("--evaluate", action="append", default=[], metavar="OPTIONS", help="of `cli.py evaluate`")
    parser.add_argument("--delete", action="store_true", help="delete the folder of a run once its rows are written")
    parser.add_argument("--curves", action="store_true", help="also write what `scaling fit` reads from the table")
    parser.add_argument("--commit", help="for the table, where the code is not in a git checkout")
    args = parser.parse_intermixed_args(arguments)
    sweeps, overrides = ([i for i in args.sweeps if is_override(i) == wanted] for wanted in (False, True))
    try:
        jobs = jobs_of(sweeps, overrides, args)
    except UserError as error:
        sys.exit(str(error))
    number = jobs[0][0].runner.gpus if jobs else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))
    tqdm.write(f"{len(jobs)} runs without a row in {args.table}, {args.jobs} at a time on {number} GPUs")
    try:
        left = work(jobs, max(args.jobs, 1), visible.split(",")[:number] or [None], args.minutes)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")
    tqdm.write(f"{left} runs left" + ("; the same command continues" if left else ""))


if __name__ == "__main__":
    main()
