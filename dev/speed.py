"""Compare five times on this GPU with the stored ones, as multiples of a matrix product that is timed in the same run.

    python dev/speed.py            compares, and exits with 1 if one is more than 5 % slower
    python dev/speed.py --store    stores the times of this run in dev/speed.json, for GPUs of this name

Each benchmark checks its results first. The benchmarks run in three rounds, and the matrix product is timed after each
of them. A ratio is the median time of a benchmark over the median time of the product: single times of the product
differ by 15 %, because the GPU lowers its clock when it gets hot.
"""

import argparse
import io
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zoo
from zoo.performance.timing import as_graph, medians

FILE = Path(__file__).with_suffix(".json")  # name of a GPU → name of a case → its time over that of the product
TOLERANCE = 0.05
SIZE, TURNS = 8192, 8  # of the matrices; products in a measurement
ROUNDS = 3
CONSOLE = Console(width=120)
KERNEL = {"shapes": [(4, 16, 4096, 128)], "dtype": "bf16", "device": "cuda", "seconds": 4.0}
MODEL = ("gated_deltanet.yaml", "size/400m.yaml")
# with half of these tokens the step of the unexpanded model waits for the host, and its time varies by 10 %
TRAINING = {"batch_size": 8, "length": 4096, "precision": "bf16-true", "device": "cuda", "steps": 12}


def kernel(op: str, folder: str) -> float:
    [row] = zoo.bench("kernels", ops=[op], folder=folder, **KERNEL).rows
    return row["fwd_bwd_graph_ms"]


def training(folder: str, *overlays: str) -> float:
    [row] = zoo.bench("training", *MODEL, *overlays, folder=folder, **TRAINING).rows
    return row["step_ms"]


def decoding(folder: str) -> float:
    report = zoo.bench("decode", *MODEL, batch_sizes=[1], positions=[1024], device="cuda", seconds=4.0, folder=folder)
    return next(row["ms"] for row in report.rows if row["how"] == "CUDA graph")


CASES: dict[str, Callable[[str], float]] = {
    "delta rule, forward and backward": lambda folder: kernel("delta_rule", folder),
    "KDA, forward and backward": lambda folder: kernel("kda", folder),
    "per-channel recurrence, forward and backward": lambda folder: kernel("linear_channel", folder),
    "training step, Gated DeltaNet 400M": training,
    "training step, eightfold state": lambda folder: training(folder, "ablate/expand_8.yaml"),
    "decoding, a token": decoding,
}


class Yardstick:
    """Times a product of two bf16 matrices, in milliseconds."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        a, b = (torch.randn(SIZE, SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        self.call = as_graph(lambda: a @ b, self.device)

    def measure(self) -> float:
        return medians({"product": self.call}, self.device, seconds=1.0, least=TURNS)["product"]


def measure() -> dict[str, float]:
    """Return the ratio of each case, from medians over the rounds, and print each time."""
    yardstick, times = Yardstick(), {name: list[float]() for name in CASES}
    products = [yardstick.measure()]
    for round_number, (name, run) in itertools.product(range(ROUNDS), CASES.items()):
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            times[name].append(run(folder))
        torch.cuda.empty_cache()
        products.append(yardstick.measure())
        round_times = f"{times[name][-1]:.3f} ms, then the product: {products[-1]:.3f} ms"
        CONSOLE.print(f"round {round_number + 1}: {name}: {round_times}")
    product = statistics.median(products)
    return {name: statistics.median(values) / product for name, values in times.items()}


def compare(ratios: dict[str, float], stored: dict[str, float], gpu: str) -> bool:
    """Print a table, and return whether a case is slower than its stored ratio allows."""
    table = Table("case", "ratio to the product", "stored", "change", title=f"{gpu}: times over a {SIZE}³ product")
    slower = False
    for name, ratio in ratios.items():
        before = stored.get(name)
        change = None if before is None else ratio / before - 1
        slower |= change is not None and change > TOLERANCE
        verdict = "not stored" if change is None else f"{change:+.1%}"
        if change is not None and abs(change) > TOLERANCE:
            verdict += " SLOWER" if change > 0 else " faster: store it"
        table.add_row(name, f"{ratio:.4g}", "" if before is None else f"{before:.4g}", verdict)
    CONSOLE.print(table)
    return slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="store the ratios of this run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: dev/speed.py measures a GPU, and PyTorch finds none on this machine")
    gpu = torch.cuda.get_device_name()
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    ratios = measure()
    slower = compare(ratios, known.get(gpu, {}), gpu)
    if arguments.store:
        FILE.write_text(json.dumps({**known, gpu: ratios}, indent=2) + "\n")
    sys.exit(int(slower and not arguments.store))


if __name__ == "__main__":
    main()
