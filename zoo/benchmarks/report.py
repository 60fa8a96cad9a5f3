"""The report of a benchmark: a table for the terminal, bench.json and, where there is a curve, bench.png."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator
from rich import box
from rich.table import Table

from zoo.files.atomic import atomic_write

# suffix in a row → column: time of a call, and of its kernels alone when a CUDA graph launches them
TIMES = {"": "called ms", "_graph": "as graph ms"}
PATH = "path: the implementations that ran, triton, torch, reference or flashqla"


@dataclass
class Report:
    """The rows of one benchmark.

    Args:
        benchmark: kernels, training, decode, scaling, expansion or length.
        folder: The folder to write to.
        about: Device, versions and settings.
        rows: One row per measurement.
    """

    benchmark: str
    folder: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a result was wrong."""
        return any(map(_wrong, self.rows))

    def write(self) -> None:
        """Write bench.json and bench.png."""
        record = {"kind": self.benchmark, **self.about, "rows": self.rows}
        with atomic_write(self.folder / "bench.json") as file:
            file.write(json.dumps(record, indent=1, allow_nan=False).encode())
        picture = PICTURES[self.benchmark](self) if self.benchmark in PICTURES else None
        if picture is not None:
            with atomic_write(self.folder / "bench.png") as file:
                picture.savefig(file, format="png")

    def table(self) -> Table:
        """The table for the terminal."""
        return TABLES[self.benchmark](self)


def kernels_table(report: Report) -> Table:
    """A row for each op and shape, with the peers' times and their ratios to ours below."""
    suffixes = [suffix for suffix in TIMES if any(f"fwd{suffix}_ms" in row for row in report.rows)]
    columns = ["op", "B×H×T×D", "path", *(TIMES[suffix] for suffix in suffixes), "TFLOP/s", "of limit"]
    if report.about["peers"]:
        columns += [f"peer ÷ ours {TIMES[suffix].removesuffix(' ms')}" for suffix in suffixes]
    table = _table(report, columns)
    remarks = ["all: forward / forward and backward; TFLOP/s and fraction of the roofline are for the last time column"]
    remarks.append(PATH)
    for row in report.rows:
        head = [row["op"], "×".join(map(str, row["shape"].values()))]
        if "fwd_ms" not in row:
            _without(table, remarks, head, row)
        elif row["in_table"]:
            table.add_row(
                *head,
                row["implementation"],
                *_times(row, suffixes),
                f"{row['fwd_tflops']:.3g} / {row['fwd_bwd_tflops']:.3g}",
                _pair(row["fwd_roofline"], row["fwd_bwd_roofline"], "{:.0%}"),
            )
            remarks += [f"{row['op']}: no graph, {row['graph_note']}"] if "graph_note" in row else []
            for name, peer in row["peers"].items():
                if "note" in peer:
                    remarks.append(f"{name}: {peer['note']}")
                    continue
                remarks += [f"{name}: no graph, {peer['graph_note']}"] if "graph_note" in peer else []
                ratios = [_pair(peer.get(f"fwd{s}_ratio"), peer.get(f"fwd_bwd{s}_ratio"), "{:.2f}×") for s in suffixes]
                table.add_row(f"  {name}", "", "", *_times(peer, suffixes), "", "", *ratios)
    return _captioned(table, remarks)


def _times(row: dict[str, Any], suffixes: Iterable[str]) -> list[str]:
    return [_pair(row.get(f"fwd{suffix}_ms"), row.get(f"fwd_bwd{suffix}_ms"), "{:.3f}") for suffix in suffixes]


def training_table(report: Report) -> Table:
    """A row for each model."""
    about = report.about
    milliseconds = ("step_ms", "forward_ms", "backward_ms", "optimiser_ms")
    columns = ["model", "params", "path", "tok/s", "step ms", "fwd", "bwd", "optim", "GiB", "MFU", "first", "ready"]
    table = _table(report, columns)
    remarks = [
        f"batch {about['batch_size']} × {about['length']} tokens{', compiled' if about['compiled'] else ''}",
        "first: seconds of the first step; ready: from the start of the process to its end",
        PATH,
    ]
    for row in report.rows:
        if "step_ms" not in row:
            _without(table, remarks, [row["model"]], row)
            continue
        table.add_row(
            row["model"],
            f"{row['parameters'] / 1e6:.1f} M",
            _path(row, remarks),
            f"{row['tokens_per_second']:,.0f}",
            *(f"{row[key]:.1f}" for key in milliseconds),
            _formatted(row["peak_gib"], "{:.1f}"),
            _formatted(row["mfu"], "{:.1%}"),
            f"{row['first_step_s']:.1f}",
            _formatted(row["ready_s"], "{:.1f}"),
        )
    return _captioned(table, remarks)


def _path(row: dict[str, Any], remarks: list[str]) -> str:
    """The implementations of all ops of a model, and remarks on which ops have another than most."""
    ops: dict[str, list[str]] = {}
    for op, names in row.get("implementations", {}).items():
        ops.setdefault(" + ".join(names), []).append(op)
    most, *others = sorted(ops, key=lambda names: -len(ops[names])) or [""]
    remarks += [f"{row['model']}: {names}: {', '.join(ops[names])}" for names in others]
    return " + ".join([most, *others])


def decode_table(report: Report) -> Table:
    """A row for each batch size and position."""
    table = _table(report, ["model", "batch", "position", "how", "ms/token", "tok/s", "state MB"])
    remarks: list[str] = []
    for row in report.rows:
        head = [row["model"], str(row["batch_size"]), str(row["position"]), row["how"]]
        if "ms" not in row:
            _without(table, remarks, head, row)
            continue
        state = None if row["state_bytes"] is None else row["state_bytes"] / 1e6
        table.add_row(*head, f"{row['ms']:.3f}", f"{row['tokens_per_second']:,.0f}", _formatted(state, "{:.1f}"))
        remarks += [row["note"]] if "note" in row else []
    return _captioned(table, remarks)


def scaling_table(report: Report) -> Table:
    """A row for each strategy and number of devices."""
    about = report.about
    parts = list(next((row["parts_ms"] for row in report.rows if "parts_ms" in row), ()))
    optional = {"communication_ms": ("waits", "{:.1f}"), "peak_gib": ("GiB", "{:.1f}")}  # not measured everywhere
    optional = {key: column for key, column in optional.items() if any(row.get(key) is not None for row in report.rows)}
    names = [name for name, _ in optional.values()]
    table = _table(report, ["way", "devices", "tok/s", "efficiency", "step ms", *parts, *names, "loss differs"])
    remarks = [
        f"batch {about['batch_size']} × {about['length']} tokens per device, or per group that shares sequences",
        "efficiency: tokens/s relative to those of one device times the number of devices",
        *([f"{', '.join((*parts, *names))}: of the first device; parts of a step in ms"] if parts else []),
        *(["waits: the end of backward, waiting for gradients of other devices"] if "waits" in names else []),
        "loss differs: largest relative difference from one device on the same samples",
    ]
    for row in report.rows:
        head = [row["way"], str(row["devices"])]
        if "step_ms" not in row or _wrong(row):
            _without(table, remarks, head, row)
            continue
        table.add_row(
            *head,
            f"{row['tokens_per_second']:,.0f}",
            _formatted(row["efficiency"], "{:.0%}"),
            *(f"{value:.1f}" for value in (row["step_ms"], *row["parts_ms"].values())),
            *(_formatted(row[key], form) for key, (_, form) in optional.items()),
            _formatted(row["loss_difference"], "{:.0e}"),
        )
        remarks += [f"{' '.join(head)}: {row['note']}"] if "note" in row else []
    return _captioned(table, remarks)


def expansion_table(report: Report) -> Table:
    """A row for each model, factor and form."""
    about = report.about
    columns = ["model", "E", "form", "params", "state", "tok/s", "of E=1", "paper", "of long", "paper", "GiB", "of E=1"]
    columns += ["TFLOP/s", "path"]
    table = _table(report, columns)
    remarks = [
        f"batch {about['batch_size']} × {about['length']} tokens",
        "of E=1: tokens/s and memory relative to the same model's; E = 1 is measured first and last, and averaged",
        "of long: tokens/s relative to one long head of the same state",
        "paper: the same ratios in Liu et al., Tables 9 and 2",
        PATH,
    ]
    for row in report.rows:
        head = [row["model"], str(row["factor"]), row["form"]]
        if "step_ms" not in row:
            _without(table, remarks, head, row)
            continue
        papers = [about["paper"][key].get(str(row["factor"])) for key in ("of_one", "subheads_of_long_head")]
        papers = [None, None] if row["form"] == "long head" else papers
        table.add_row(
            *head,
            f"{row['parameters'] / 1e6:.1f} M",
            EngFormatter(places=1, sep="")(row["state_size"]),
            f"{row['tokens_per_second']:,.0f}",
            _formatted(row.get("of_one"), "{:.2f}"),
            _formatted(papers[0], "{:.2f}"),
            _formatted(row.get("of_long_head"), "{:.2f}"),
            _formatted(papers[1], "{:.2f}"),
            _formatted(row["peak_gib"], "{:.1f}"),
            _formatted(row.get("gib_of_one"), "{:.2f}"),
            f"{row['tflops']:.3g}",
            _path(row, remarks),
        )
    return _captioned(table, remarks)


def expansion_figure(report: Report) -> Figure | None:
    """Plots over E of speed and memory relative to E = 1, and of TFLOP/s, a line for each model and form."""
    rows = [row for row in report.rows if "of_one" in row]
    factors = sorted({row["factor"] for row in rows})
    if len(factors) < 2:
        return None
    panels = {"of_one": "tokens/s relative to E = 1"}
    panels |= {"gib_of_one": "memory relative to E = 1"} if any("gib_of_one" in row for row in rows) else {}
    panels |= {"tflops": "TFLOP/s of training"}
    picture = Figure(figsize=(1.5 + 4.2 * len(panels), 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    for place, (key, label) in enumerate(panels.items(), start=1):
        axes = picture.add_subplot(1, len(panels), place, xlabel="E", ylabel=label, xscale="log")
        for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            for form, style in (("subheads", "-"), ("long head", ":")):
                line = [row for row in rows if row["model"] == model and row["form"] in (form, "") and key in row]
                line = sorted({row["factor"]: row for row in line}.values(), key=lambda row: row["factor"])
                if len(line) > 1:
                    points = [row["factor"] for row in line], [row[key] for row in line]
                    axes.plot(*points, style, color=f"C{number}", marker="o", markersize=4, label=f"{model}, {form}")
        if key == "of_one":
            paper = report.about["paper"][key]
            axes.plot(
                [*map(int, paper)], [*paper.values()], "--", color="gray", marker="x", label="Liu et al., Table 9"
            )
        axes.set_xticks(factors, [str(factor) for factor in factors])
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside right center", fontsize="small")
    about = report.about
    picture.suptitle(f"{about['device']}, {about['precision']}, {about['batch_size']} × {about['length']}", fontsize=10)
    return picture


def length_table(report: Report) -> Table:
    """A row for each model and length."""
    table = _table(report, ["model", "length", "batch", "params", "tok/s", "step ms", "GiB", "TFLOP/s", "path"])
    remarks = [f"{report.about['tokens']} tokens in each step", PATH]
    for row in report.rows:
        head = [row["model"], str(row["length"]), str(row["batch_size"])]
        if "step_ms" not in row:
            _without(table, remarks, head, row)
            continue
        table.add_row(
            *head,
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_ms']:.1f}",
            _formatted(row["peak_gib"], "{:.1f}"),
            f"{row['tflops']:.3g}",
            _path(row, remarks),
        )
    return _captioned(table, remarks)


def length_figure(report: Report) -> Figure | None:
    """A plot of tokens per second over the length of sequences, a line for each model; None for a single length."""
    rows = [row for row in report.rows if "step_ms" in row]
    lengths = sorted({row["length"] for row in rows})
    if len(lengths) < 2:
        return None
    about = report.about
    picture = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot(xlabel="tokens in a sequence", ylabel="tokens/s in training", xscale="log")
    axes.set_title(f"{about['device']}, {about['precision']}, {about['tokens']} tokens in a step", fontsize=10)
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        line = [(row["length"], row["tokens_per_second"]) for row in rows if row["model"] == model]
        axes.plot(*zip(*line, strict=True), color=f"C{number}", marker="o", markersize=4, label=model)
    axes.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    picture.legend(loc="outside right center", fontsize="small")
    return picture


def figure(report: Report) -> Figure | None:
    """A plot of forward and backward time over length, one line per op; None without measurements over lengths."""
    rows = [row for row in report.rows if row.get("in_curve") and "fwd_bwd_ms" in row]
    if not rows:
        return None
    picture = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    B, H, _, D = rows[0]["shape"].values()
    axes = picture.add_subplot(
        xlabel="tokens",
        ylabel="forward + backward, ms",
        xscale="log",
        yscale="log",
        title=f"B = {B}, H = {H}, D = {D}, {report.about['dtype']}, {report.about['device']}",
    )
    lengths = sorted({row["shape"]["T"] for row in rows})
    for op in dict.fromkeys(row["op"] for row in rows):
        line = sorted((row["shape"]["T"], row["fwd_bwd_ms"]) for row in rows if row["op"] == op)
        axes.plot([T for T, _ in line], [ms for _, ms in line], marker=".", label=op)
    axes.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.title.set_fontsize("small")
    return picture


def scaling_figure(report: Report) -> Figure | None:
    """Plots of tokens per second and of GPU memory over the number of devices, one line per strategy."""
    rows = [row for row in report.rows if "step_ms" in row and not _wrong(row)]
    base = next((row for row in rows if row["devices"] == 1), None)
    devices = sorted({row["devices"] for row in rows})
    if len(devices) < 2:
        return None
    with_memory = any(row["peak_gib"] is not None for row in rows)
    picture = Figure(figsize=(10 if with_memory else 6, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    panels = {"tokens_per_second": "tokens/s, all devices together"}
    panels |= {"peak_gib": "GiB of the first device"} if with_memory else {}
    for place, (key, label) in enumerate(panels.items(), start=1):
        axes = picture.add_subplot(1, len(panels), place, xlabel="devices", ylabel=label)
        if base is not None and key == "tokens_per_second":
            ideal = [n * base[key] for n in devices]
            axes.plot(devices, ideal, color="gray", linestyle="--", linewidth=1, label="ideal")
        for way in dict.fromkeys(row["way"] for row in rows if row is not base):
            line = [row for row in rows if row is base or row["way"] == way]
            axes.plot([row["devices"] for row in line], [row[key] for row in line], marker="o", label=way)
        axes.set_xticks(devices, [str(n) for n in devices])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    picture.axes[0].legend(fontsize="small")
    about = report.about
    picture.suptitle(f"{about['device']}, {about['precision']}, {about['batch_size']} × {about['length']}", fontsize=10)
    return picture


def _table(report: Report, columns: Iterable[str]) -> Table:
    about = report.about
    triton = f", triton {about['triton']}" if about["triton"] else ""
    title = f"{about['device']}, torch {about['torch']}{triton}, {about.get('dtype') or about['precision']}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.collapse_padding, table.pad_edge = True, False  # 100 columns hold the widest
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _captioned(table: Table, remarks: Iterable[str]) -> Table:
    table.caption = "\n".join(dict.fromkeys(remarks)) or None
    return table


def _without(table: Table, remarks: list[str], head: list[str], row: dict[str, Any]) -> None:
    """Add a row without a result, and a remark with the reason."""
    wrong = _wrong(row)
    table.add_row(*head, "WRONG" if wrong else "–", style="red" if wrong else None)
    remarks.append(f"{' '.join(part for part in head if part)}: {row['note']}")


def _wrong(row: dict[str, Any]) -> bool:
    return "gate" in row and not row["gate"]["passed"]


def _formatted(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _pair(first: float | None, second: float | None, form: str) -> str:
    return "" if first is None or second is None else f"{form.format(first)} / {form.format(second)}"


TABLES: dict[str, Callable[[Report], Table]] = {
    "kernels": kernels_table,
    "training": training_table,
    "decode": decode_table,
    "scaling": scaling_table,
    "expansion": expansion_table,
    "length": length_table,
}
PICTURES: dict[str, Callable[[Report], Figure | None]] = {
    "kernels": figure,
    "scaling": scaling_figure,
    "expansion": expansion_figure,
    "length": length_figure,
}
