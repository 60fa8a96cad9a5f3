"""Compare `fit --dry_run` with the first steps of the same runs: memory and seconds a step at 400M parameters.

    PYTHONPATH=. python reproductions/dry_run.py

Each run is a recipe on the corpus of `mixed_corpus.py` that stops after a few steps. Runs on one GPU go at the same
time, one on each GPU; runs on all GPUs follow. A row is written when it is measured, and rows that the table has are
not measured again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock

import torch

import zoo
from reproductions import write_csv
from reproductions.multi_device import CALLBACKS, outcome
from zoo.experiments.runner import COMMAND

CONFIGS = ("qwen3_5", "gated_deltanet", "mamba2", "transformer", "kda_hybrid", "gdn_h2")
OVERLAYS = ("recipe/400m.yaml", "data/mixed.yaml")
STEPS, WARM_UP = 5, 3
TOKENS = 128 * 4096  # of a step
LOCK = Lock()  # of the table, and of the parser, which is not for several threads


def measure(table: Path, config: str, gpus: Sequence[str], card: str, overrides: Sequence[str]) -> None:
    """Add the row of a config on these GPUs."""
    named, items = f"{len(gpus)}x{card}", (f"{config}.yaml", *OVERLAYS)
    with LOCK:
        estimate = zoo.fit(*items, *overrides, dry_run=True, on=named).row
    short = ("--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1", f"--trainer.max_steps={STEPS}")
    with tempfile.TemporaryDirectory() as folder:
        run, log = Path(folder) / "run", Path(folder) / "run.log"
        options = [
            *short,
            f"--trainer.callbacks+={CALLBACKS}",
            *(f"--{override}" for override in overrides),
            "--run",
            run.as_posix(),
        ]
        command = [*COMMAND, "fit", *(f"--config={name}" for name in items), *options]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with log.open("wb") as stream:
            code = subprocess.run(command, env=environment, stdout=stream, stderr=stream).returncode
        numbers, note = outcome(run, code, WARM_UP, 1, on_gpu=torch.cuda.is_available())[1:]
    row = {
        "config": config,
        "on": named,
        "estimated_gib": sum(estimate["memory"].values()),
        "measured_gib": numbers.get("peak_gib"),
        "estimated_seconds": 3600 * (estimate["hours"] or 0) * TOKENS / estimate["tokens"],
        "measured_seconds": numbers["step_ms"] / 1e3 if numbers else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "note": note,
    }
    sys.stdout.write(f"{row}\n")
    with LOCK:
        write_csv.write([*write_csv.read(table), row], table)


def main(options: argparse.Namespace) -> None:
    """Measure the rows that the table lacks."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    numbers = gpus.split(",")
    present = {(row["config"], row["on"]) for row in write_csv.read(options.table)}
    free: Queue[str] = Queue()
    for number in numbers:
        free.put(number)

    def on_one(config: str) -> None:
        number = free.get()
        try:
            measure(options.table, config, [number], options.card, options.overrides)
        finally:
            free.put(number)

    with ThreadPoolExecutor(len(numbers)) as pool:
        [*pool.map(on_one, [name for name in options.configs if (name, f"1x{options.card}") not in present])]
    for config in options.configs:
        if len(numbers) > 1 and (config, f"{len(numbers)}x{options.card}") not in present:
            measure(options.table, config, numbers, options.card, options.overrides)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=lambda text: text.split(","), default=CONFIGS)
    parser.add_argument("--card", default="H200", help="name of the GPU for the dry run")
    parser.add_argument("overrides", nargs="*", help="key=value, of all runs")
    parser.add_argument("--table", type=Path, default=Path("reproductions/measured/dry_run_h200.csv"))
    main(parser.parse_args())
