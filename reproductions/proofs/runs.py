"""Properties of runs: a resumed run has the losses of one that was not stopped, and processes train as one."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from reproductions.proofs.findings import as_finding, attempted
from zoo.checkpoints.format import read_checkpoint
from zoo.performance.doctor import Finding

# Associative recall by a small Gated DeltaNet, on the CPU: the data is made up, and no other process is in the way.
FIT = (
    *("fit", "--config", "recall/mqar.yaml", "--data.tasks=[{length: 64, pairs: 4}]", "--data.batch_size=4"),
    *("--trainer.accelerator=cpu", "--trainer.limit_val_batches=1", "--optim.schedule=constant"),
    "--trainer.log_every_n_steps=1",
)
NAME = "training, fp32"
HALF, STEPS = 3, 6
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")
SHARED = ("--context_parallel=2", *TWO)
# in deterministic mode, each step in two micro-batches of two halves of the sequences
PARTS = ("--deterministic_kernels=true", "--rows_per_device=2", "--sequence_parts=2")
WAYS = {"one process": (), "two with rows": TWO, "two with sequences": SHARED}
LIMIT = 1e-5  # relative, of losses of a sequence that two processes share
TIMEOUT = 300


def prove(checks: Collection[str]) -> Iterator[Finding]:
    """The findings about runs, of these checks."""
    with TemporaryDirectory() as folder:
        for check, proof in PROOFS.items():
            if check in checks:
                yield attempted(NAME, check, partial(proof, Path(folder)))


def resumed(desk: Path) -> Finding:
    """Check that a run that is continued has the losses, bit by bit, of one that was not stopped."""
    _fit_whole(desk)
    _fit(desk, *FIT, f"--trainer.max_steps={HALF}", "--run", "half")
    _fit(desk, "fit", "--resume", "half", f"--trainer.max_steps={STEPS}")
    expected, actual = _losses(desk / "runs" / "whole"), _losses(desk / "runs" / "half")
    differing = [step for step, loss in expected.items() if actual.get(step) != loss]
    says = "exact" if not differing else f"the losses of steps {', '.join(map(str, differing))} differ"
    return as_finding(NAME, "resumed", not differing, says, steps=len(expected), differing=differing)


def shared(desk: Path) -> Finding:
    """Compare two processes that share each sequence with one that has all of it."""
    _fit_whole(desk)
    _fit(desk, *FIT, *SHARED, f"--trainer.max_steps={STEPS}", "--run", "shared")
    expected, actual = _losses(desk / "runs" / "whole"), _losses(desk / "runs" / "shared")
    change = max(abs(actual[step] / loss - 1) for step, loss in expected.items())
    finding = as_finding(NAME, "2 processes", change <= LIMIT, f"{change:.0e}" if change else "exact", change=change)
    return finding if change == 0 or change > LIMIT else finding._replace(status="noted")


def processes(desk: Path) -> Finding:
    """Check that two processes have the losses and weights of one in deterministic mode, bit by bit."""
    for way, options in WAYS.items():
        _fit(desk, *FIT, *PARTS, *options, f"--trainer.max_steps={STEPS}", "--run", way)
    results = {way: (_losses(desk / "runs" / way), _weights(desk / "runs" / way)) for way in WAYS}
    losses, weights = results["one process"]
    differing = [
        way
        for way, (own_losses, own_weights) in results.items()
        if own_losses != losses or not all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())
    ]
    says = "exact" if not differing else f"losses or weights of {' and '.join(differing)} differ"
    return as_finding(NAME, "processes", not differing, says, steps=len(losses), differing=differing)


PROOFS = {"resumed": resumed, "2 processes": shared, "processes": processes}


def _fit_whole(desk: Path) -> None:
    """Train the run that others are compared with, unless it exists."""
    if not (desk / "runs" / "whole").exists():
        _fit(desk, *FIT, f"--trainer.max_steps={STEPS}", "--run", "whole")


def _fit(desk: Path, *arguments: str) -> None:
    """Run the command line in a folder; what it prints is an error's message if it fails."""
    cli = find_spec("cli")
    assert cli is not None
    command = [sys.executable, str(cli.origin), *arguments]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command,
        cwd=desk,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # sums may depend on the number of threads
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])


def _losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = {row["step"]: row["train_loss"] for row in rows if "train_loss" in row}
    if len(losses) != STEPS:
        raise RuntimeError(f"{run.name} has the losses of {len(losses)} steps, not of {STEPS}")
    return losses


def _weights(run: Path) -> dict[str, Tensor]:
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
