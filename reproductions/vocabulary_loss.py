"""Time and memory of the vocabulary loss with its gradients, compared with PyTorch's loss of all logits.

    python reproductions/vocabulary_loss.py
    python reproductions/vocabulary_loss.py --tokens=4096 --vocab_size=128256

Loss and gradients of both are compared with fp32 at the full size before they are timed. It writes a bench.json.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import kernels
from kernels import UserError
from mixers.arguments import check_sizes
from zoo.config.command_line import arguments_of
from zoo.performance.accuracy import Gate
from zoo.performance.bench_report import Report, captioned, formatted, is_wrong, show, without
from zoo.performance.device import DTYPES, described, pick_dtype
from zoo.performance.timing import as_graph, medians, synchronize
from zoo.train.devices import pick_device

LIMIT = {"bf16": 1e-2, "fp16": 1e-2, "fp32": 1e-4}  # largest relative error
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class LossReport(Report):
    """Times of the vocabulary loss."""

    benchmark = "loss"

    def table(self) -> Table:
        """A row for each implementation."""
        table, remarks = self.new_table(["loss", "ms", "as graph ms", "GiB"]), list[str]()
        for row in self.rows:
            if is_wrong(row):
                without(table, remarks, [row["implementation"]], row)
                continue
            numbers = (formatted(row.get(key), "{:.2f}") for key in ("ms", "graph_ms", "gib"))
            table.add_row(row["implementation"], *numbers)
        return captioned(table, remarks)


def all_logits(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's loss, summed over the tokens, of logits [N,V] that are all in memory, in fp32."""
    return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")


LOSSES: dict[str, Loss] = {"ours": kernels.linear_cross_entropy, "all logits": all_logits}


def both(loss: Loss, x: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss and its gradients."""
    total = loss(x, weight, labels)
    dx, dweight = torch.autograd.grad(total, (x, weight))
    return {"loss": total.detach(), "dx": dx, "dweight": dweight}


def vocabulary_loss(
    tokens: int = 32768,
    hidden_size: int = 1024,
    vocab_size: int = 32000,
    dtype: str | None = None,
    seconds: float = 2.0,
    device: str | None = None,
    folder: str = "runs/vocabulary-loss",
) -> Report:
    """Time the vocabulary loss with its gradients, after checking both.

    Args:
        tokens: Number of tokens.
        hidden_size: Size of their vectors.
        vocab_size: Size of the vocabulary.
        dtype: bf16, fp16 or fp32; null for bf16 on a GPU and fp32 on a CPU.
        seconds: Time to spend on each measurement.
        device: cpu or cuda; null for the GPU if available.
        folder: The folder of bench.json.

    Raises:
        UserError: An argument is invalid.
    """
    check_sizes({"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size})
    where = pick_device(device)
    dtype = pick_dtype(dtype, where)
    generator = torch.Generator(where).manual_seed(0)
    x, weight = (
        torch.randn(rows, hidden_size, device=where, generator=generator).to(DTYPES[dtype])
        for rows in (tokens, vocab_size)
    )
    weight *= hidden_size**-0.5
    labels = torch.randint(vocab_size, (tokens,), device=where, generator=generator)
    inputs = (x.requires_grad_(), weight.requires_grad_(), labels)
    sizes = {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size, "dtype": dtype}
    report = LossReport(Path(folder), described(where) | sizes)
    exact = both(all_logits, x.detach().float().requires_grad_(), weight.detach().float().requires_grad_(), labels)
    calls = {}
    for name, loss in LOSSES.items():
        gate, row = Gate(), dict[str, Any](implementation=name)
        for result, value in both(loss, *inputs).items():
            gate.check(result, value, exact[result], LIMIT[dtype])
        row["gate"] = gate.record()
        report.add(row)
        if gate.passed:
            calls[name] = partial(both, loss, *inputs)
        else:
            row["note"] = gate.says
    del exact
    times = {"ms": medians(calls, where, seconds)}
    peaks = {}
    if where.type == "cuda":
        peaks = {name: peak_gib(call, where) for name, call in calls.items()}
        times["graph_ms"] = medians({name: as_graph(call, where) for name, call in calls.items()}, where, seconds)
    for row in report.rows:
        row |= {key: ms_of.get(row["implementation"]) for key, ms_of in times.items()}
        row["gib"] = peaks.get(row["implementation"])
    return report


def peak_gib(call: Callable[[], Any], device: torch.device) -> float:
    """GiB that a call needs beyond its inputs."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if a result was wrong."""
    _, options = arguments_of(vocabulary_loss, arguments, "vocabulary_loss")
    return int(show(vocabulary_loss(**options)).failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
