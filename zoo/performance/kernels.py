"""`bench kernels`: forward and backward times of the ops, compared with the device's limits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
# delta rules that are not Gated DeltaNet
GENERAL_ON_GPU = [(4, 16, 4096, 128), (1, 16, 32768, 128), (8, 32, 4096, 128)]
ON_CPU = [(1, 4, 1024, 64)]
OURS = "ours"
Call = Callable[[Tensors], Tensor]  # inputs → outputs [B,T,H,D]
# suffix in a row → column: time of a call, and of its kernels alone when a CUDA graph launches them
TIMES = {"": "called ms", "_graph": "as graph ms"}


class KernelReport(Report):
    """Times of ops."""

    benchmark = "kernels"

    def table(self) -> Table:
        """A row for each op and shape."""
        suffixes = [suffix for suffix in TIMES if any(f"fwd{suffix}_ms" in row for row in self.rows)]
        times = [TIMES[suffix] for suffix in suffixes]
        table = self.new_table(["op", "B×H×T×D", "path", *times, "TFLOP/s", "of limit", *self.further(suffixes)])
        remarks = [
            "all: forward / forward and backward; TFLOP/s and fraction of the roofline are for the last time column",
            PATH,
        ]
        for row in self.rows:
            head = [self.name(row), "×".join(map(str, row["shape"].values()))]
            if "fwd_ms" not in row:
                without(table, remarks, head, row)
                continue
            speed = f"{row['fwd_tflops']:.3g} / {row['fwd_bwd_tflops']:.3g}"
            of_limit = pair(row["fwd_roofline"], row["fwd_bwd_roofline"], "{:.0%}")
            table.add_row(*head, row["implementation"], *cells(row, suffixes), speed, of_limit)
            remarks += [f"{row['op']}: no graph, {row['graph_note']}"] if "graph_note" in row else []
            self.add_below(table, remarks, row, suffixes)
        return captioned(table, remarks)

    def name(self, row: dict[str, Any]) -> str:
        """The op of a row."""
        return str(row["op"])

    def further(self, suffixes: Sequence[str]) -> list[str]:
        """Further columns; none here."""
        return []

    def add_below(self, table: Table, remarks: list[str], row: dict[str, Any], suffixes: Sequence[str]) -> None:
        """Add lines below that of a row; none here."""


def cells(row: Mapping[str, Any], suffixes: Iterable[str]) -> list[str]:
    """The times of a row."""
    return [pair(row.get(f"fwd{suffix}_ms"), row.get(f"fwd_bwd{suffix}_ms"), "{:.3f}") for suffix in suffixes]


class Planned(NamedTuple):
    """A call to measure: what the progress bar says, the first entries of its row, and how it is made."""

    says: str
    row: dict[str, Any]
    make: Callable[[], BenchCall]


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

    Raises:
        UserError: An argument is invalid.
    """
    where, precision, plan = planned(ops, shapes, dtype, backend, device, window_size, seconds, key_heads)
    report = KernelReport(Path(folder), {**described(where), "dtype": precision})
    return recorded(report, plan, lambda case, says: measured(case, seconds))


def planned(
    ops: list[str] | str | None,
    shapes: list[tuple[int, int, int, int]] | None,
    dtype: str | None,
    backend: str | None,
    device: str | None,
    window_size: int | None,
    seconds: float,
    key_heads: int | None,
) -> tuple[torch.device, str, list[Planned]]:
    """The device, the dtype, and the calls of `bench_kernels`, which describes the arguments and errors."""
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
    pairs = [(name, Shape(*shape)) for name in names for shape in shapes or _default_shapes(name, on_gpu)]
    if key_heads is not None and (names != ["delta_rule"] or any(shape.H % key_heads for _, shape in pairs)):
        raise UserError(f"key_heads: {key_heads} is for --ops=delta_rule alone, and must divide H of all shapes")
    for name in names:  # reports a missing backend before any measurement
        BenchCall(name, Shape(1, 1, 1, pairs[0][1].D), precision, where, backend, window)
    plan = []
    for name, shape in dict.fromkeys(pairs):
        row = {"op": name, "shape": shape._asdict(), "key_heads": key_heads, "dtype": precision}
        make = partial(BenchCall, name, shape, precision, where, backend, window, key_heads)
        plan.append(Planned(f"{name} {'×'.join(map(str, shape))}", row, make))
    return where, precision, plan


def recorded(report: Report, plan: Iterable[Planned], measure: Callable[[BenchCall, str], dict[str, Any]]) -> Report:
    """Make and measure calls one after another, and add their rows to a report."""
    for says, row, make in (bar := progress_bar(list(plan), desc="kernels", unit=" calls")):
        bar.set_postfix_str(says)
        try:
            row |= measure(make(), says)
        except torch.OutOfMemoryError:
            row["note"] = "does not fit into memory"
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        report.add(row)
    return report


def _default_shapes(name: str, on_gpu: bool) -> list[tuple[int, int, int, int]]:
    """The shapes of an op's rows in the table."""
    if not on_gpu:
        return ON_CPU
    if OPS[name].attention:
        return WINDOW_ON_GPU
    return GENERAL_ON_GPU if OPS[name].general else ON_GPU


def measured(case: BenchCall, seconds: float) -> dict[str, Any]:
    """The row of a case: its check, and its times if it passed."""
    row = checked(case)
    if "note" in row:
        return row
    times, refused = times_of(case, {OURS: case.call}, seconds)
    return row | speeds(case, times[OURS]) | ({"graph_note": refused[OURS]} if OURS in refused else {})


def checked(case: BenchCall) -> dict[str, Any]:
    """The row of a case without times; it has a note if the results are wrong."""
    gate = case.check()
    row = {"implementation": case.implementation, "window_size": case.window, "gate": gate.record()}
    return row if gate.passed else {**row, "note": gate.says}


def times_of(
    case: BenchCall, calls: Mapping[str, Call], seconds: float
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Time functions of the inputs of a case in alternation.

    Returns:
        Name → milliseconds of a forward pass, `fwd_ms`, of both passes, `fwd_bwd_ms`, and on a GPU of both as CUDA
        graphs, `fwd_graph_ms` and `fwd_bwd_graph_ms`; and name → why a function cannot be captured.
    """
    device, times, refused = case.do.device, {name: dict[str, float]() for name in calls}, dict[str, str]()
    runs = {"fwd": {name: _forward(call, case.inputs) for name, call in calls.items()}}
    runs["fwd_bwd"] = {name: _both(case, call) for name, call in calls.items()}
    timed = [(f"{key}_ms", functions) for key, functions in runs.items()]
    for key, functions in runs.items() if device.type == "cuda" else ():
        graphs, reasons = _graphs(functions, device)
        timed.append((f"{key}_graph_ms", graphs))
        refused |= reasons
    for key, functions in timed:
        for name, ms in medians(functions, device, seconds / 2).items():
            times[name][key] = ms
    return times, refused


def speeds(case: BenchCall, times: Mapping[str, float]) -> dict[str, Any]:
    """The times of a case with its TFLOP/s, and the fractions of the roofline, None where that is unknown."""
    row: dict[str, Any] = dict(times)
    # two products backward for each product forward
    for key, products, moved in (("fwd", 1, case.moved[0]), ("fwd_bwd", 3, case.moved[1])):
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
