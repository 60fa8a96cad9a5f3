"""Times of the recurrences with a decay per channel at gentle and at steep decays, on one GPU.

    python reproductions/steep_decays.py
    python reproductions/steep_decays.py --cases=[half,packed] --ops=[linear_recurrence] --decays=[-0.05,-5,-20]

Each row has the median time of a forward pass and of both passes in ms, and their ratios to those of the first decays.
Results are compared with the loop by tests (`pytest -m gpu tests/kernels`), not here.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import UserError
from reproductions import script, write_csv
from zoo.arguments import check_above_0, check_names
from zoo.performance.device import described
from zoo.performance.timing import medians
from zoo.train.devices import pick_device

DECAYS = ("-0.05", "-5", "-20", "inf 5%", "bounded", "one -5", "-100", "-1", "-2", "-3", "softplus")
OPS = ("delta_rule", "linear_recurrence")
DOCUMENTS = 23  # about as many in a packed row


class Case(NamedTuple):
    """Sizes of a row."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False


CASES = {
    "fast": Case(4, 4096, 16, 128, 128),
    "short": Case(16, 1024, 16, 128, 128),
    "packed": Case(4, 4096, 16, 128, 128, packed=True),
    "half": Case(4, 4096, 32, 64, 64),
    "half keys": Case(4, 4096, 16, 64, 128),
    "wide": Case(4, 4096, 8, 256, 256),
    "fp32": Case(1, 4096, 16, 128, 128, dtype=torch.float32),
}


def log_decays(kind: str, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Log decays [B,T,H,K]: near a number, bounded at −5, of softplus gates at their start, or mostly near −0.05."""
    noise, (_, _, H, K) = torch.randn(shape, device=device), shape
    if kind == "softplus":
        rate = torch.empty(H, 1, device=device).uniform_(1, 16)
        dt = torch.empty(H, K, device=device).uniform_(-6.9, -2.3).exp()
        return -rate * F.softplus(noise + dt + (-torch.expm1(-dt)).log())
    if kind == "bounded":
        return -5 * torch.sigmoid(noise)
    near = (1 + 0.1 * noise.tanh()) * (-0.05 if kind in ("one -5", "inf 5%") else float(kind))
    if kind == "one -5":
        near[..., 7 % K] = -5.0
    return near.masked_fill(torch.rand_like(noise) < 0.05, -torch.inf) if kind == "inf 5%" else near


def passes(op: str, case: Case, decays: str, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The forward pass of an op, and both passes."""
    torch.manual_seed(0)
    B, T = (1, case.B * case.T) if case.packed else (case.B, case.T)

    def draw(*shape: int) -> Tensor:
        return torch.randn(B, T, case.H, *shape, device=device, dtype=case.dtype)

    q, k, v = draw(case.K), F.normalize(draw(case.K), dim=-1), draw(case.V)
    beta = [draw().sigmoid()] if op == "delta_rule" else []
    inputs = [q, k, v, *beta, log_decays(decays, (B, T, case.H, case.K), device)]
    inputs = [x.detach().requires_grad_() for x in inputs]
    ends = torch.arange(T // DOCUMENTS, T, T // DOCUMENTS)
    cu_seqlens = torch.cat([torch.tensor([0]), ends, torch.tensor([T])]).to(device, torch.int32)
    options = {"cu_seqlens": cu_seqlens} if case.packed else {}
    o_grad = draw(case.V)

    def forward() -> Tensor:
        return getattr(kernels, op)(*inputs, **options)[0]

    def alone() -> None:
        with torch.no_grad():
            forward()

    return {"forward": alone, "both": lambda: torch.autograd.grad(forward(), inputs, o_grad)}


def steep_decays(
    cases: list[str] | None = None,
    ops: list[str] | None = None,
    decays: list[str | float] | None = None,
    device: str | None = None,
    each: float = 0.2,
    seconds: float | None = None,
    file: str = "runs/steep_decays.csv",
) -> None:
    """Time the ops at each kind of decays.

    Args:
        cases: Any of fast, short, packed, half, half keys, wide and fp32; null for all.
        ops: delta_rule, linear_recurrence, or both (null).
        decays: Kinds of decays, the gentlest first, such as -0.05 or bounded; null for all.
        device: cpu or cuda; null for the GPU if available.
        each: Seconds to time each row.
        seconds: Time after which no further row is measured; null for no limit.
        file: The CSV to write, row by row; it must not exist.

    Raises:
        UserError: An argument is invalid.
    """
    kinds = [kind if isinstance(kind, str) else f"{kind:g}" for kind in decays or DECAYS]
    for name, given, known in (("cases", cases, CASES), ("ops", ops, OPS), ("decays", kinds, DECAYS)):
        check_names(name, given or [], known)
    check_above_0("each", each)
    if Path(file).exists():
        raise UserError(f"file: {file} exists; delete it, or name another one")
    start, where, rows = time.monotonic(), pick_device(device), list[dict[str, Any]]()
    for case in cases or CASES:
        for op in ops or OPS:
            first: dict[str, float] | None = None
            for kind in kinds:
                if seconds is not None and time.monotonic() - start > seconds:
                    return
                sizes = CASES[case]
                times = medians(passes(op, sizes, kind, where), where, each)
                first = first or times
                row = {"op": op, "case": case, **{name: getattr(sizes, name) for name in "BHTKV"}, "decays": kind}
                row |= {f"{name}_ms": round(times[name], 3) for name in times}
                row |= {f"{name}_ratio": round(times[name] / first[name], 3) for name in times}
                rows.append(row | {"card": described(where)["device"]})
                write_csv.write(rows, Path(file))
                sys.stdout.write(f"{op}, {case}, {kind}: {row['forward_ms']} / {row['both_ms']} ms\n")
                sys.stdout.flush()


if __name__ == "__main__":
    script.run(steep_decays)
