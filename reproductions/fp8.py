"""Training speed with matrix products in bf16 and in FP8, for docs/fp8.md: `python reproductions/fp8.py` on a GPU."""

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import UserError
from reproductions import write_csv
from zoo import config as configs
from zoo.config.command_line import arguments_of
from zoo.lm.model import LanguageModel
from zoo.performance.accuracy import Gate
from zoo.performance.device import described
from zoo.performance.model import build, compared, conditioned, learning, lowest_layers, mean_loss, read
from zoo.performance.timing import synchronize
from zoo.performance.training import TimedLearner
from zoo.train.callbacks.fp8_products import FP8Products
from zoo.train.devices import pick_device

MEASURED = Path(__file__).parent / "measured" / "fp8_h100.csv"
NAMES = {False: "bf16", True: "fp8"}
LARGEST = 0.3  # relative error of gradients in FP8, whose products are off by 4 % each
LENGTH = 96  # tokens of the check: whole rows of FP8 products


def set_products(model: LanguageModel, fp8: bool) -> None:
    """Let the blocks compute their products in FP8, or in the precision of the run."""
    for block in model.layers:
        vars(block).pop("forward", None)
    for block, forward in FP8Products().replaced(model) if fp8 else ():
        block.forward = forward  # type: ignore[method-assign]


def checked(parsed: Any, fp8: bool, device: torch.device) -> Gate:
    """Compare loss and gradients of the lowest layers with fp32; twice the error of chunkwise PyTorch is allowed."""

    def measure(model: LanguageModel) -> dict[str, Tensor]:
        set_products(model, fp8)
        return learning(model, LENGTH)

    model = conditioned(lowest_layers(build(parsed, "bf16-mixed", device)))
    gate = compared(model, "bf16-mixed", "auto", measure, lambda model: learning(model, LENGTH))
    gate.limits["gradients"] = min(gate.limits["gradients"], LARGEST) if fp8 else gate.limits["gradients"]
    return gate


def main(
    config: list[str] | None = None,
    batch_size: int = 4,
    length: int = 4096,
    rounds: int = 4,
    steps: int = 4,
    device: str | None = None,
    file: str = str(MEASURED),
) -> None:
    """Time eager bf16-mixed steps of a model, alternating between both kinds of products, and write a row for each.

    Before that, loss and gradients of both kinds are checked.

    Args:
        config: Configs and overrides; null for Gated DeltaNet with 1.5B parameters.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.
        rounds: Number of turns; the first one is not timed.
        steps: Steps of each kind in a turn; the first one is not timed.
        device: cpu or cuda; null for the GPU if available.
        file: The CSV to write.

    Raises:
        UserError: An argument is invalid, or a result is wrong.
    """
    if min(batch_size, length) < 1 or min(rounds, steps) < 2:
        raise UserError("batch_size and length must be at least 1, rounds and steps at least 2")
    where, parsed = pick_device(device), read(config or ["gated_deltanet.yaml", "size/1.5b.yaml"])
    gates = {fp8: checked(parsed, fp8, where) for fp8 in (False, True)}
    for fp8, gate in gates.items():
        if not gate.passed:
            raise UserError(f"{NAMES[fp8]}: {gate.says}; nothing was timed")
    gc.collect()  # blocks and their forward functions refer to each other
    tokens = torch.randint(parsed.model.vocab_size, (batch_size, length + 1), device=where)
    model = build(parsed, "bf16-mixed", where)
    learner = TimedLearner(
        model, configs.instantiate("optim", parsed), "bf16-mixed", "auto", lambda: mean_loss(model, tokens)
    )
    times: dict[bool, list[float]] = {False: [], True: []}
    peaks: dict[bool, float] = {False: 0.0, True: 0.0}
    for turn in range(rounds):
        for fp8 in times:
            set_products(model, fp8)
            if where.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for step in range(steps):
                synchronize(where)
                start = time.perf_counter()
                learner.step()
                synchronize(where)
                if turn and step:
                    times[fp8].append(time.perf_counter() - start)
            if where.type == "cuda":
                peaks[fp8] = torch.cuda.max_memory_allocated() / 2**30
    about = described(where)
    rows: list[dict[str, Any]] = [
        {
            **{key: about[key] for key in ("device", "torch")},
            "products": NAMES[fp8],
            "parameters": model.num_parameters(),
            "batch_size": batch_size,
            "length": length,
            "tokens_per_second": round(batch_size * length / statistics.median(seconds)),
            "peak_gib": round(peaks[fp8], 1),
            "error": round(gates[fp8].errors["gradients"], 4),
        }
        for fp8, seconds in times.items()
    ]
    write_csv.write(rows, Path(file))
    for row in rows:
        sys.stdout.write(f"{row['products']}: {row['tokens_per_second']:,} tokens/s, {row['peak_gib']} GiB\n")


if __name__ == "__main__":
    try:
        _, arguments = arguments_of(main, sys.argv[1:], "fp8")
        main(**arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
