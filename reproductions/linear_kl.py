"""Time and memory of the divergence from a teacher with its gradients: plain PyTorch and `kernels.linear_kl`.

    python reproductions/linear_kl.py
    python reproductions/linear_kl.py --tokens=64 --vocab_size=500 --table=linear_kl_cpu.csv

The sum and the gradients are compared with those of plain PyTorch in fp32, at the full size, before the clock starts.
The table has a row for each implementation: the largest relative error, milliseconds of both passes, and GiB beyond the
arguments.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import UserError
from mixers.arguments import check_sizes
from reproductions import write_csv
from reproductions.vocabulary_loss import LIMIT, both, peak_gib
from zoo.config.command_line import arguments_of
from zoo.performance.accuracy import Gate
from zoo.performance.device import DTYPES, described, pick_dtype
from zoo.performance.timing import medians
from zoo.train.devices import pick_device


def divergence(how: str, teacher: Sequence[Tensor], x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The divergence over all tokens: "plain", from all logits in fp32, or on a backend of `kernels.linear_kl`."""
    if how == "plain":
        s, t = (F.linear(*head).float().log_softmax(-1) for head in ((x, weight), teacher))
        return F.kl_div(s, t, reduction="sum", log_target=True)
    with kernels.backend(how):
        return kernels.linear_kl(x, weight, *teacher, labels)


def linear_kl(
    tokens: int = 8 * 4096,
    hidden_size: int = 576,
    vocab_size: int = 49_152,
    dtype: str | None = None,
    seconds: float = 2.0,
    device: str | None = None,
    table: str = "linear_kl.csv",
) -> list[dict[str, Any]]:
    """Check and time each implementation, and write its row to `table`; arguments as of `vocabulary_loss`."""
    check_sizes({"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size})
    where = pick_device(device)
    dtype = pick_dtype(dtype, where)
    generator = torch.Generator(where).manual_seed(0)
    x, weight, *teacher = (
        (torch.randn(rows, hidden_size, device=where, generator=generator) * scale).to(DTYPES[dtype])
        for rows, scale in ((tokens, 1), (vocab_size, hidden_size**-0.5)) * 2
    )
    labels = torch.zeros(tokens, dtype=torch.int64, device=where)
    learned, *given = ([y.float() for y in head] for head in ((x, weight), teacher))
    exact = both(partial(divergence, "plain", *given), *(y.requires_grad_() for y in learned), labels)
    about = described(where) | {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size, "dtype": dtype}
    rows, calls = dict[str, dict[str, Any]](), {}
    for how in ("plain", "torch", "triton"):
        call = partial(both, partial(divergence, how, teacher), x.requires_grad_(), weight.requires_grad_(), labels)
        gate, rows[how] = Gate(), about | {"implementation": how, "note": "", "error": None, "ms": None, "gib": None}
        try:
            for result, value in call().items():
                gate.check(result, value, exact[result], LIMIT[dtype])
            rows[how] |= {"note": "" if gate.passed else gate.says, "error": max(gate.errors.values())}
        except UserError as error:
            rows[how]["note"] = str(error)
        if gate.passed:
            calls[how] = call
    del exact, learned, given
    for how, ms in medians(calls, where, seconds).items():
        rows[how] |= {"ms": ms, "gib": peak_gib(calls[how], where) if where.type == "cuda" else None}
    write_csv.write(rows.values(), Path(table))
    return [*rows.values()]


if __name__ == "__main__":
    try:
        print(*linear_kl(**arguments_of(linear_kl, sys.argv[1:], "linear_kl")[1]), sep="\n")  # noqa: T201
    except UserError as error:
        sys.exit(f"error: {error}")
