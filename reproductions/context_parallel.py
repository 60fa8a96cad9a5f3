"""Losses of a packed run on one process, and on two that share each sequence by `context_parallel=2`.

    python reproductions/context_parallel.py reproductions/measured/context_parallel_cpu.csv
    python reproductions/context_parallel.py context_parallel_gpu.csv --accelerator=gpu --config=gdn_h2.yaml

Each row has the largest relative difference of the two runs' losses, over all steps. In fp64 it is the difference that
the exchange makes; in fp32 training amplifies the rounding of other orders of sums, step by step.
"""

import argparse
import csv
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from zoo.train.metrics_file import read_metrics

CLI = Path(__file__).resolve().parents[1] / "cli.py"
STRATEGIES = {
    "ddp": "ddp",
    "fsdp2": "{class_path: zoo.train.fsdp2.FSDP2}",
    "zero2": "{class_path: zoo.train.zero.Zero, init_args: {stage: 2}}",
}
SMALL = ("--model.hidden_size=64", "--model.num_heads=2", "--model.num_layers=3")
DATA = ("--data.path=documents.jsonl", "--data.packing=documents", "--data.vocab_size=512", "--data.batch_size=2")


def fit(folder: Path, run: str, options: Sequence[str]) -> list[float]:
    """Train in `folder`; the loss of each step."""
    command = [sys.executable, str(CLI), "fit", *options, "--run", run]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return [row["train_loss"] for row in read_metrics(folder / "runs" / run / "metrics.jsonl") if "train_loss" in row]


def write_documents(file: Path) -> None:
    """Documents of 1 to 37 short sentences: parts of packed rows begin and end within them."""
    texts = (" ".join(f"{i} times {j} is {i * j}." for j in range(i % 37 + 1)) for i in range(4000))
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")


def main(args: Sequence[str] | None = None) -> None:
    """Train, and write a row for each strategy and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--config", default="gdn_h2.yaml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=129, help="tokens of a sequence, and one more")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["ddp", "fsdp2"])
    parser.add_argument("--precisions", nargs="+", default=["64-true", "32-true"])
    options = parser.parse_args(args)
    device = torch.cuda.get_device_name() if options.accelerator == "gpu" else "CPU"
    about = {"device": device, "python": platform.python_version(), "torch": torch.__version__}
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl")
        for precision in options.precisions:
            common = ["--config", options.config, *SMALL, *DATA, f"--data.sequence_length={options.length}"]
            common += [f"--trainer.max_steps={options.steps}", f"--trainer.val_check_interval={options.steps}"]
            common += ["--trainer.limit_val_batches=2", "--trainer.log_every_n_steps=1", "--samples.prompts=[]"]
            common += [f"--trainer.accelerator={options.accelerator}", f"--trainer.precision={precision}"]
            one = fit(folder, f"one-{precision}", [*common, "--trainer.devices=1"])
            for strategy in options.strategies:
                if precision == "64-true" and strategy != "ddp":  # the others do not support it
                    continue
                shared = ["--trainer.devices=2", "--context_parallel=2", f"--trainer.strategy={STRATEGIES[strategy]}"]
                two = fit(folder, f"{strategy}-{precision}", [*common, *shared])
                difference = max(abs(a - b) / b for a, b in zip(two, one, strict=True))
                row = {"config": options.config, "precision": precision, "strategy": strategy, "steps": len(one)}
                losses = {"first_loss": one[0], "last_loss": one[-1], "largest_difference": f"{difference:.1e}"}
                rows.append({**about, **row, **losses})
                tqdm.write(str(rows[-1]))
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
