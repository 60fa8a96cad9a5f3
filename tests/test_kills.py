"""Runs that are killed at random moments, again and again, and continued: nothing is wrong, lost, left over or stuck.

    pytest -m nightly tests/test_kills.py

Each chain is one run. It is stopped several times by a random signal, to one process or, as terminals and schedulers
do, to its whole group; and it is started again by the command that a person would type. In the end it must have written
what an uninterrupted run writes, bit for bit. In most chains the signals come at random steps, inside the run; in the
others at any time, also while it starts or ends.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from zoo.checkpoints.format import read_checkpoint
from zoo.runs.folder import has_checkpoint
from zoo.train.metrics_file import read_metrics

from .commands import CLI, FIT, sitting_at
from .forked_python import fork_server

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]

PATIENCE = 120  # seconds in which a process must end; many times what it takes
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Stopped by a signal, or, by one that comes before the run listens or after it, killed or complete.
ENDED_BY = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CODES = {*(-number for number in ENDED_BY), 128 + signal.SIGTERM, 128 + signal.SIGHUP, 128 + signal.SIGINT, 0}
STEPS = 24
RUN = (
    *FIT,
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=4",
    "--checkpoints.every_n_steps=3",
    "--optim.warmup_steps=2",
    "--optim.learning_rate=1e-2",
    "--trainer.log_every_n_steps=1",
)
EVALUATION = ("--tasks=perplexity,passkey", "--lengths=[64,128,256,512]", "--samples=8")
MARK = "ZOO_TEST_CHAIN"  # in the environment of all that a chain starts


class Variant(NamedTuple):
    """What is switched on, and how many chains of it."""

    options: tuple[str, ...]
    inside: int  # chains whose signals come inside the run
    anywhere: int = 1  # chains whose signals come at any time


ACCUMULATE = ("--trainer.accumulate_grad_batches=3", "--trainer.val_check_interval=8")  # validations inside a step
WORKERS = ("--data.num_workers=2",)
DDP = ("--trainer.devices=2", "--trainer.strategy=ddp")
BACKGROUND = ("--config", "train/background_checkpoints.yaml")
SHARDED = "{class_path: zoo.train.fsdp2.FSDP2, init_args: {sharded_checkpoints: true}}"
FSDP = ("--trainer.devices=2", "--trainer.accelerator=cpu", f"--trainer.strategy={SHARDED}")
ZERO = ("--config", "train/cpu_deepspeed.yaml", "--trainer.accumulate_grad_batches=2")
VARIANTS = {
    "plain": Variant((), 2, 4),
    "accumulation": Variant(ACCUMULATE, 3, 4),
    "workers": Variant(WORKERS, 2),
    "documents": Variant(("--config", "data/documents.yaml"), 2),
    "mixture": Variant(("--config", "data/mixture.yaml"), 2),
    "background": Variant(BACKGROUND, 3, 2),
    "together": Variant((*ACCUMULATE, *WORKERS, *BACKGROUND, "--config", "data/documents.yaml"), 3, 2),
    "ddp": Variant((*DDP, *ACCUMULATE), 3),
    "ddp-together": Variant((*DDP, *ACCUMULATE, *WORKERS, *BACKGROUND), 3),
    "fsdp": Variant((*FSDP, *ACCUMULATE, *WORKERS), 3),
    "fsdp-background": Variant((*FSDP, *BACKGROUND), 3),
    "zero1": Variant((*ZERO, "--trainer.strategy.stage=1", *WORKERS), 2),
    "zero2": Variant(ZERO, 2),
    "zero3": Variant((*ZERO, "--trainer.strategy.stage=3"), 2),
}
CHAINS = [
    (name, where, number)
    for name, variant in VARIANTS.items()
    for where, count in (("inside", variant.inside), ("anywhere", variant.anywhere))
    for number in range(count)
]


class Chain:
    """A run that is stopped and started again.

    Args:
        folder: The working directory.
        name: Of the run.
        cache: Where the tokens lie.
        seed: Of the moments and signals.
    """

    def __init__(self, folder: Path, name: str, cache: Path, seed: int) -> None:
        self.folder, self.name, self.cache = folder, name, cache
        self.random = random.Random(f"{name} {seed}")
        self.mark = f"{name}-{seed}-{os.getpid()}"
        self.log = folder / f"{name}.log"
        self.history: list[str] = []

    def start(self, *arguments: str) -> int:
        """The number of a process that runs a command line."""
        environment = {
            "ZOO_CACHE": str(self.cache),
            "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", ""),
            MARK: self.mark,
        }
        return fork_server().start([str(CLI), *arguments], self.folder, environment, self.log)

    def end(self, number: int, seconds: float = PATIENCE) -> int:
        """Its exit code; it must end, and leave no process behind."""
        ended = fork_server().wait(number, seconds)
        if ended is None:
            os.kill(number, signal.SIGKILL)
            fork_server().wait(number, PATIENCE)
        assert ended is not None, self.told("a process hangs")
        deadline = time.monotonic() + 20  # children that are told to end by the end of their parent
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for orphan in left:
            os.kill(orphan, signal.SIGKILL)
        assert not left, self.told(f"processes are left: {left}")
        return ended

    def processes(self) -> list[int]:
        """All processes that the chain has started and that run."""
        actual = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit():
                    continue
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                # a forked process keeps the environment of the fork server there; what that starts has its own
                mine = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                if state != "Z" and (mine or int(session) in self.sessions):
                    actual.append(int(entry.name))
            except OSError:
                continue  # it has ended
        return actual

    sessions: tuple[int, ...] = ()

    def stop(self, number: int, moment: str) -> None:
        """Send a random signal, to the process or to its group."""
        kind, group = self.random.choice(SIGNALS), self.random.random() < 0.5
        with suppress(ProcessLookupError):  # it was faster
            os.killpg(number, kind) if group else os.kill(number, kind)
        self.history.append(f"{kind.name}{' to the group' if group else ''} {moment}")

    def told(self, what: str) -> str:
        return f"{self.name}: {what}; {'; '.join(self.history)}\n{self.log.read_text()[-3000:]}"

    def survive(self, first: Callable[[], tuple[str, ...]], wait: Callable[[int], str], kills: int = 3) -> int:
        """Start what `first` says until it completes, stopped some times on the way.

        Args:
            first: The command line, which depends on what is there.
            wait: Waits until a process is to be stopped, and says when that is.
            kills: How often to stop it.

        Returns:
            How often it was stopped.
        """
        for attempt in range(kills + 1):
            number = self.start(*first())
            self.sessions = (*self.sessions, number)
            if attempt < kills:
                self.stop(number, wait(number))
            code = self.end(number)
            assert code in CODES, self.told(f"exit code {code}")
            assert "Traceback" not in self.log.read_text(), self.told("a traceback")
            if code == 0 and attempt < kills:  # the signal came too late
                return attempt
        assert code == 0, self.told(f"it was not stopped, and ended with {code}")
        return kills

    def after(self, seconds: float) -> Callable[[int], str]:
        """Wait for a random time of at most some seconds."""

        def wait(_: int) -> str:
            time.sleep(moment := self.random.uniform(0, seconds))
            return f"after {moment:.2f} s"

        return wait

    def at_progress(self, progress: Callable[[], int], end: int) -> Callable[[int], str]:
        """Wait until a random number below `end`, above the one at the start, is reached."""

        def wait(number: int) -> str:
            goal = self.random.randint(min(progress() + 1, end - 1), end - 1)
            while progress() < goal and is_running(number):
                time.sleep(0.002)
            time.sleep(self.random.uniform(0, 0.02))
            return f"at {progress()} of {end}"

        return wait


def is_running(number: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines(file: Path) -> int:
    """The number of lines of a file; 0 without one."""
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def outcome(run: Path) -> dict[str, object]:
    """All of a complete run that does not depend on the time it took."""
    rows = read_metrics(run / "metrics.jsonl")
    row = json.loads((run / "results.json").read_text())
    best = read_checkpoint(run / "checkpoints" / "best.ckpt")
    return {
        "losses": {row["step"]: row["train_loss"] for row in rows if "train_loss" in row},
        "validations": {row["step"]: row["val_loss"] for row in rows if "val_loss" in row},
        "tokens": {row["step"]: row["tokens"] for row in rows if "train_loss" in row},
        "results": {name: row[name] for name in ("status", "steps", "tokens_seen", "val_loss", "val_loss_by_position")},
        "best": (best["global_step"], best["zoo"]["tokens_seen"]),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Callable:
    """`whole(variant)` → the outcome of an uninterrupted run, and the seconds that it takes."""
    finished: dict[str, tuple[dict[str, object], float]] = {}

    def run(variant: str) -> tuple[dict[str, object], float]:
        if variant not in finished:
            folder = tmp_path_factory.mktemp("whole")
            with sitting_at(folder, shared_cache):
                chain = Chain(folder, variant, shared_cache, 0)
                first = chain.start(*RUN, *VARIANTS[variant].options, "--run", "x", "--trainer.max_steps=1")
                assert chain.end(first) == 0, chain.told("the first run failed")  # tokenised now
                start = time.monotonic()
                number = chain.start(*RUN, *VARIANTS[variant].options, "--run", variant)
                assert chain.end(number) == 0, chain.told("the whole run failed")
            finished[variant] = outcome(folder / "runs" / variant), time.monotonic() - start
        return finished[variant]

    return run


@pytest.mark.parametrize(("variant", "where", "seed"), CHAINS)
def test_a_run_survives(
    variant: str, where: str, seed: int, whole: Callable, tmp_path: Path, shared_cache: Path
) -> None:
    expected, seconds = whole(variant)
    run = tmp_path / "runs" / variant
    with sitting_at(tmp_path, shared_cache):
        chain = Chain(tmp_path, variant, shared_cache, seed)

        def command() -> tuple[str, ...]:
            if has_checkpoint(run):
                return "fit", "--resume", f"runs/{variant}"
            return *RUN, *VARIANTS[variant].options, "--run", variant

        if where == "inside":
            stops = chain.survive(command, chain.at_progress(lambda: lines(run / "metrics.jsonl"), STEPS))
            assert stops > 0, chain.told("no signal came inside the run")
        else:
            chain.survive(command, chain.after(seconds))
    actual = outcome(run)
    for what, value in expected.items():
        assert actual[what] == value, chain.told(f"other {what}")


TEXT = "".join(f"line {number} of the text, {number * number}\n" for number in range(60_000))


@pytest.mark.parametrize("seed", range(4))
def test_tokenising_survives(seed: int, tmp_path: Path) -> None:
    """A text that is new each time, tokenised by two workers."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{seed} {number}\n{TEXT}")
    options = (
        "--data.path=text",
        "--data.preprocessing_workers=2",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
    )
    outcomes = []
    for name in ("whole", "killed"):
        cache = tmp_path / f"cache-{name}"
        with sitting_at(tmp_path, cache):
            chain = Chain(tmp_path, name, cache, seed)
            run = tmp_path / "runs" / name

            def command(name: str = name, run: Path = run) -> tuple[str, ...]:
                return ("fit", "--resume", f"runs/{name}") if has_checkpoint(run) else (*FIT, *options, "--run", name)

            def size(cache: Path = cache) -> int:
                return sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) // 10_000

            if name == "whole":
                chain.survive(command, chain.after(0.0), kills=0)
                final = size()
            else:
                stops = chain.survive(command, chain.at_progress(size, final))
                assert stops > 0, chain.told("no signal came while it tokenised")
        outcomes.append(outcome(run))
    assert outcomes[0] == outcomes[1], chain.told("another outcome")


@pytest.mark.parametrize("seed", range(4))
def test_an_evaluation_survives(seed: int, finished: Path, tmp_path: Path, shared_cache: Path) -> None:
    """Its rows are those of an evaluation that was not stopped, each once."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    actual = []
    for name in ("whole", "killed"):
        with sitting_at(tmp_path, shared_cache):
            chain = Chain(tmp_path, name, shared_cache, seed)
            command = ("evaluate", "--checkpoint", "runs/done", f"--output={name}", *EVALUATION)

            def cells(name: str = name) -> int:
                return lines(tmp_path / name / "rows.jsonl")

            if name == "whole":
                chain.survive(lambda command=command: command, chain.after(0.0), kills=0)
                final = cells()
            else:
                stops = chain.survive(lambda command=command: command, chain.at_progress(cells, final), kills=2)
                assert stops > 0, chain.told("no signal came inside the evaluation")
        records = [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        actual.append(sorted(json.dumps([record["what"], record["rows"]], sort_keys=True) for record in records))
    assert actual[0] == actual[1], chain.told("other rows")


SWEEP = """
base: [gated_deltanet.yaml, tiny.yaml]
axes: {model.num_layers: [1, 2]}
seeds: [0, 1]
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_sweep_survives(seed: int, tmp_path: Path, shared_cache: Path) -> None:
    """Its runs end with it, however it ends, and the next sweep does not collide with them."""
    (tmp_path / "layers.yaml").write_text(SWEEP)
    tables = []
    for name in ("whole", "killed"):
        folder = tmp_path / "runs" / name
        with sitting_at(tmp_path, shared_cache):
            chain = Chain(tmp_path, name, shared_cache, seed)
            options = ("--jobs=2", "--trainer.max_steps=20")
            command = ("sweep", "--config", "layers.yaml", "--folder", f"runs/{name}", *options)

            def steps(folder: Path = folder) -> int:
                return sum(lines(file) for file in folder.glob("*/metrics.jsonl"))

            if name == "whole":
                chain.survive(lambda command=command: command, chain.after(0.0), kills=0)
                final = steps()
            else:
                stops = chain.survive(lambda command=command: command, chain.at_progress(steps, final), kills=2)
                assert stops > 0, chain.told("no signal came while runs were trained")
        rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*/results.json"))]
        tables.append([(row["run"], row["status"], row["steps"], row["val_loss"]) for row in rows])
    assert len(tables[0]) == 4
    assert tables[0] == tables[1], chain.told("another table")
