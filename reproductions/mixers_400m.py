"""Parameters, state, FLOPs and training speed of the models of 400M parameters, for a table in docs/which_mixer.md.

    python reproductions/mixers_400m.py
    python reproductions/mixers_400m.py --speed=true --models=[kda,gla]

The first command writes the sizes on any machine, and keeps the speeds that the file has. The second also times
captured training steps on a GPU, one model after the other. Each row is written when it is measured, and a speed that
the file has is not measured again, so a run that was stopped continues.
"""

import gc
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from reproductions import script, write_csv
from zoo import config as configs
from zoo.arguments import check_names
from zoo.performance.bench_report import Report
from zoo.performance.model import build, read
from zoo.performance.training import DOES_NOT_FIT, bench_training
from zoo.train.devices import pick_device

MEASURED = Path(__file__).parent / "measured" / "mixers_400m.csv"
OVERLAY = re.compile(r"# Larger: (size/[\w-]*400m\.yaml)")
SETTINGS = ("device", "torch", "triton", "precision")
SPEED = ("tokens_per_second", "step_ms", "peak_gib", "mfu")
COLUMNS = (
    "model",
    "overlay",
    "parameters",
    "state",
    "grows",
    "gflops",
    *SETTINGS,
    "batch_size",
    "length",
    *SPEED,
    "note",
)
Row = dict[str, Any]


def overlays() -> dict[str, str]:
    """The size overlay of each config that has one of 400M parameters, as its header says."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(configs.CONFIGS.glob("*.yaml"))}
    return {name: match[1] for name, text in texts.items() if (match := OVERLAY.search(text))}


def sizes_of(config: list[str], length: int) -> Row:
    """Return parameters, state and forward GFLOPs per token of a model, for sequences of `length` tokens."""
    model = build(read(config), "32-true", torch.device("meta"))
    row = {"parameters": model.num_parameters(), "state": int(model.state_size(length))}
    row |= {"grows": int(not all(mixer.constant_state for mixer in model.mixers))}
    return row | {"gflops": round(model.flops(length) / length / 1e9, 4)}


def speed_of(config: list[str], batch_size: int, length: int, steps: int, device: torch.device) -> Row:
    """Return the speed of a model in training, with half as many sequences where `batch_size` do not fit."""
    captured, folder = device.type == "cuda", f"runs/mixers_400m/{Path(config[0]).stem}"
    try:
        report: Report = bench_training(
            config, batch_size, length, steps, device=device.type, cuda_graph=captured, folder=folder
        )
        row, about = report.rows[0], report.about
    except torch.OutOfMemoryError:
        row, about = {"note": DOES_NOT_FIT}, {}
    gc.collect()  # graphs and optimisers refer to each other
    if captured:
        torch.cuda.empty_cache()
    note = row.get("note") or row.get("not_captured")
    if note and batch_size > 1 and (note == DOES_NOT_FIT or "out of memory" in note):
        return speed_of(config, batch_size // 2, length, steps, device)
    settings = {key: about.get(key) for key in SETTINGS} | {"batch_size": batch_size, "length": length}
    return settings | {key: row.get(key) for key in SPEED} | {"note": note}


def mixers_400m(
    models: list[str] | None = None,
    speed: bool = False,
    batch_size: int = 8,
    length: int = 4096,
    steps: int = 8,
    device: str | None = None,
    seconds: float | None = None,
    file: str = str(MEASURED),
) -> None:
    """Write sizes of models of 400M parameters, and their speed in training.

    Args:
        models: Names of configs, such as kda; null for all that have an overlay of 400M.
        speed: Whether to measure the speed of models whose row has none.
        batch_size: Sequences in a step; half as many where they do not fit.
        length: Tokens in a sequence.
        steps: Number of steps to time, after a few others; on a GPU after four seconds of them, or 100.
        device: cpu or cuda; null for the GPU if available.
        seconds: Time after which no further model is measured; null for no limit.
        file: The CSV to update.

    Raises:
        UserError: An argument is invalid.
    """
    start, target, available = time.monotonic(), Path(file), overlays()
    check_names("models", models or [], available)
    rows: dict[str, Row] = {row["model"]: dict(row) for row in write_csv.read(target, COLUMNS)}
    for name in models or available:
        if speed and (rows.get(name, {}).get("tokens_per_second") or _is_over(start, seconds)):
            continue
        config = [f"{name}.yaml", available[name]]
        row = rows[name] = rows.get(name, {}) | {"model": name, "overlay": config[1]} | sizes_of(config, length)
        if speed:
            row |= speed_of(config, batch_size, length, steps, pick_device(device))
            sys.stdout.write(f"{name}: {row['tokens_per_second']} tokens/s, batch {row['batch_size']}, {row['note']}\n")
            sys.stdout.flush()
        write_csv.write([rows[name] for name in sorted(rows)], target, COLUMNS)
    sys.stdout.write(f"rows: {target}\n")


def _is_over(start: float, seconds: float | None) -> bool:
    return seconds is not None and time.monotonic() - start > seconds


if __name__ == "__main__":
    script.run(mixers_400m)
