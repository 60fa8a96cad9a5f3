"""`bench kernels`: forward and backward times of the ops, compared with the device's limits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kernels import UserError
from zoo.arguments import check_above_0, check_names, names_in
from zoo.display import progress_bar
from zoo.performance.bench_calls import OPS, BenchCall, Shape, Tensors
from zoo.performance.bench_report import PATH, Report, captioned, complaint, pair, without
from zoo.performance.device import described, pick_backend, pick_dtype, roofline_ms
from zoo.performance.timing import TimedCall, as_graph, medians
from zoo.train.devices import pick_device

ON_GPU = [(4, 8, 4096, 128), (4, 64, 4096, 128), (1, 8, 65536, 128)]
WINDOW_ON_GPU = [(4, 8, 8192, 128)]
GENERAL_ON_GPU = [
    (4, 16, 4096, 128),
    (1, 16, 32768, 128),
    (8, 32, 4096, 128),
]  # delta rules that are not Gated DeltaNet
ON_CPU = [(1, 4, 1024, 64)]
OURS = "ours"
Call = Callable[[Tensors], Tensor]  # inputs → outputs [B,T,H,D]
# a case, the seconds for each measurement, and a progress bar's description → the rows of the case
Measure = Callable[[BenchCall, float, Callable[[str], None]], Iterable[dict[str, Any]]]

# suffix in a row → column: time of a call, and of its kernels alone when a CUDA graph launches them
TIMES = {"": "called ms", "_graph": "as graph ms"}
ABOUT_TIMES = "all: forward / forward and backward; TFLOP/s and fraction of the roofline are for the last time column"


class KernelReport(Report):
    """Times of ops."""

    benchmark = "kernels"

    def table(self) -> Table:
        """A row for each op and shape."""
        suffixes = self.suffixes()
        columns = ["op", "B×H×T×D", "path", *(TIMES[suffix] for suffix in suffixes), "TFLOP/s", "of limit"]
        table, remarks = self.new_table(columns), [ABOUT_TIMES, PATH]
        for row in self.rows:
            self.add_times(table, remarks, row["op"], row, suffixes)
        return captioned(table, remarks)

    def suffixes(self) -> list[str]:
        """Return the kinds of times that there are."""
        return [suffix for suffix in TIMES if any(f"fwd{suffix}_ms" in row for row in self.rows)]

    def add_times(
        self, table: Table, remarks: list[str], name: str, row: dict[str, Any], suffixes: Iterable[str]
    ) -> None:
        """Add a row about our implementation to a table, under a name."""
        head = [name, "×".join(map(str, row["shape"].values()))]
        if "fwd_ms" not in row:
            without(table, remarks, head, row)
            return
        table.add_row(
            *head,
            row["implementation"],
            *times(row, suffixes),
            f"{row['fwd_tflops']:.3g} / {row['fwd_bwd_tflops']:.3g}",
            pair(row["fwd_roofline"], row["fwd_bwd_roofline"], "{:.0%}"),
        )
        remarks += [f"{row['op']}: no graph, {row['graph_note']}"] if "graph_note" in row else []


def times(row: dict[str, Any], suffixes: Iterable[str]) -> list[str]:
    """The times of a row as text, forward and with the backward pass."""
    return [pair(row.get(f"fwd{suffix}_ms"), row.get(f"fwd_bwd{suffix}_ms"), "{:.3f}") for suffix in suffixes]


def measured(case: BenchCall, seconds: float, announce: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """Yield the row of a case: its check, and its times if it passed."""
    row = checked(case)
    if "note" not in row:
        announce("timing")
        milliseconds, refused = timed(case, {OURS: case.call}, seconds)
        row |= speeds(case, milliseconds)
        row |= {"graph_note": refused[OURS]} if refused else {}
    yield row


def _announce(bar: Any, says: str, stage: str) -> None:
    """Show in a progress bar what is done next for a case."""
    bar.set_postfix_str(f"{says}, {stage}")


def bench_kernels(
    ops: list[str] | str | None = None,
    shapes: list[tuple[int, int, int, int]] | None = None,
    dtype: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    window_size: int | None = None,
    seconds: float = 0.8,
    key_heads: int | None = None,
    folder: str = "runs/bench-kernels",
    others: Measure | None = None,
) -> Report:
    """Time the ops, forward and with their backward pass, after checking their results.

    Args:
        ops: Any of delta_rule (as Gated DeltaNet calls it), kda, kda_with_gates (from pre-activations, with norms),
            gated_deltanet2, comba, gated_deltaproduct (two steps), linear_head, linear_channel, linear_constant (named
            after their decays), window_attention and forgetting_attention; all by default.
        shapes: [B, H, T, D]: batch, heads, tokens and key size; null for defaults of the device.
        dtype: bf16, fp16 or fp32; null for bf16 on a GPU and fp32 on a CPU.
        backend: Backend of the kernels: auto, triton, torch or reference; null for ZOO_BACKEND, or auto.
        device: cpu or cuda; null for the GPU if available.
        window_size: Window of window_attention; null for 2048 on a GPU and 256 on a CPU. One that is not shorter than
            the sequences is full attention.
        seconds: Time to spend on each measurement.
        key_heads: Heads of queries and keys of delta_rule, a divisor of H; null for H.
        folder: The folder of bench.json.
        others: In Python, a function that makes the rows of a case, next to those of others.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    on_gpu = where.type == "cuda"
    names = list(OPS) if ops is None else list(dict.fromkeys(names_in(ops)))
    check_names("ops", names or [""], OPS)
    precision = pick_dtype(dtype, where)
    backend = pick_backend(backend)
    window = window_size or (2048 if on_gpu else 256)
    check_above_0("seconds", seconds)
    sizes_by_name: dict[str, Sequence[Sequence[int]]] = {
        "shapes": shapes or [],
        "window_size": [[window]],
        "key_heads": [[] if key_heads is None else [key_heads]],
    }
    for argument, sizes in sizes_by_name.items():
        if any(number < 1 for shape in sizes for number in shape):
            raise UserError(f"{argument}: all sizes must be at least 1")
    table = [
        (name, Shape(*shape))
        for name in names
        for shape in (_default_shapes(name, on_gpu) if shapes is None else shapes)
    ]
    if key_heads is not None and (names != ["delta_rule"] or any(shape.H % key_heads for _, shape in table)):
        raise UserError(f"key_heads: {key_heads} is for --ops=delta_rule alone, and must divide H of all shapes")

    for name in names:  # reports a missing backend before any measurement
        BenchCall(name, table[0][1]._replace(B=1, H=1, T=1), precision, where, backend, window)
    report = KernelReport(Path(folder), {**described(where), "dtype": precision})
    for name, shape in (bar := progress_bar(list(dict.fromkeys(table)), desc="kernels", unit=" calls")):
        says = f"{name} {'×'.join(map(str, shape))}"
        bar.set_postfix_str(says)
        about: dict[str, Any] = {"op": name, "shape": shape._asdict(), "key_heads": key_heads, "dtype": precision}
        try:
            case = BenchCall(name, shape, precision, where, backend, window, key_heads)
            announce = partial(_announce, bar, says)
            for row in (others or measured)(case, seconds, announce):
                report.add(about | row)
        except torch.OutOfMemoryError:
            report.add({**about, "note": "does not fit into memory"})
        case = None  # type: ignore[assignment]
        if on_gpu:
            torch.cuda.empty_cache()
    return report


def _default_shapes(name: str, on_gpu: bool) -> list[tuple[int, int, int, int]]:
    """The shapes of an op's rows in the table."""
    if not on_gpu:
        return ON_CPU
    if OPS[name].attention:
        return WINDOW_ON_GPU
    return GENERAL_ON_GPU if OPS[name].general else ON_GPU


def checked(case: BenchCall) -> dict[str, Any]:
    """The row of a case without times: its implementation and its check, with a note if that failed."""
    gate = case.check()
    row = {"implementation": case.implementation, "window_size": case.window, "gate": gate.record()}
    return row if gate.passed else {**row, "note": gate.says}


def timed(
    case: BenchCall, calls: Mapping[str, Call], seconds: float
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Time implementations of a case in alternation.

    Returns:
        The median times by `fwd`, `fwd_bwd`, `fwd_graph` and `fwd_bwd_graph`, then by name, in ms; and why some
        implementations cannot be captured, by name.
    """
    device = case.do.device
    runs = {"fwd": {name: _forward(call, case.inputs) for name, call in calls.items()}}
    runs["fwd_bwd"] = {name: _both(case, call) for name, call in calls.items()}
    times = {key: medians(each, device, seconds / 2) for key, each in runs.items()}
    refused: dict[str, str] = {}
    if device.type == "cuda":
        for key, each in runs.items():
            graphs, reasons = _graphs(each, device)
            times[f"{key}_graph"] = medians(graphs, device, seconds / 2)
            refused |= reasons
    return times, refused


def speeds(case: BenchCall, times: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The entries of a row for the times of our implementation: with its TFLOP/s, and the fraction of the roofline."""
    row: dict[str, Any] = {f"{key}_ms": ms_of[OURS] for key, ms_of in times.items() if OURS in ms_of}
    for key, products, moved in (
        ("fwd", 1, case.moved[0]),
        ("fwd_bwd", 3, case.moved[1]),  # two products backward for each product forward
    ):
        ms = row.get(f"{key}_graph_ms", row[f"{key}_ms"])
        row[f"{key}_tflops"] = products * case.flops / ms / 1e9
        least = roofline_ms(case.do.device, case.dtype, products * case.flops, moved)
        row[f"{key}_roofline"] = None if least is None else least / ms
    return row


def _graphs(calls: dict[str, TimedCall], device: torch.device) -> tuple[dict[str, TimedCall], dict[str, str]]:
    """The calls as CUDA graphs, and why some cannot be captured."""
    graphs, refused = {}, {}
    for name, call in calls.items():
        try:
            graphs[name] = as_graph(call, device)
        except RuntimeError as error:
            if name == OURS and isinstance(error, torch.OutOfMemoryError):
                raise
            refused[name] = complaint(error)
    return graphs, refused


def _forward(call: Any, inputs: Tensors) -> TimedCall:
    def run() -> None:
        with torch.no_grad():
            call(inputs)

    return run


def _both(case: BenchCall, call: Any) -> TimedCall:
    leaves = {n: x.detach().requires_grad_(n in case.learned) for n, x in case.inputs.items()}
    learned = [leaves[n] for n in case.learned]
    return lambda: torch.autograd.grad(call(leaves), learned, case.do)
