"""`bench expansion`: cost of a larger state in training, compared with the same model without expansion."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table
from tqdm import tqdm

from kernels import UserError
from zoo.benchmarks import model as models
from zoo.benchmarks.alone import Settings, checked, trained
from zoo.benchmarks.device import described, pick_backend
from zoo.benchmarks.report import PATH, Report, captioned, formatted, path_of, without
from zoo.benchmarks.training import WARM_UP
from zoo.train.cpu import use_processor
from zoo.train.devices import pick_device
from zoo.train.module import best_precision

# the models of Liu et al., and two more: a config, and what its overlays in configs/size are called
MODELS = {
    "gated_deltanet": ("state_expansion/gated_deltanet.yaml", "size/{}.yaml"),
    "gla": ("state_expansion/gla.yaml", "size/{}.yaml"),
    "hgrn2": ("hgrn2.yaml", "size/transformer-{}.yaml"),
    "mamba2": ("mamba2.yaml", "size/mamba-{}.yaml"),
}
SIZES = ("400m", "1.5b")
# Liu et al.: training with subheads relative to E = 1 (Table 9, machine and model not named); with subheads relative to
# one long head (Table 2, one H800); TFLOP/s of the recurrences alone at (4, 8, 4096, 128) (Table 10, one H800)
PAPER = {
    "of_one": {"1": 1.0, "2": 0.57, "4": 0.40, "8": 0.21},
    "subheads_of_long_head": {"8": 15722 / 9569, "16": 6554 / 2933},
    "kernel_tflops": {"attention": 213, "gla": 21, "gated_deltanet": 25},
}
CHECKED_LAYERS = 2  # all layers are alike


class Case(NamedTuple):
    """One model to measure."""

    model: str
    factor: int
    form: str  # subheads, or long head; empty for E = 1, where they are the same
    config: list[str]

    @property
    def name(self) -> str:
        """Name of the model in a remark."""
        return f"{self.model} E{self.factor}{f' {self.form}' if self.form else ''}"


class ExpansionReport(Report):
    """Training with expanded states."""

    benchmark = "expansion"

    def table(self) -> Table:
        """A row for each model, factor and form."""
        about = self.about
        columns = ["model", "E", "form", "params", "state", "tok/s", "of E=1", "paper", "of long", "paper"]
        columns += ["GiB", "of E=1", "TFLOP/s", "path"]
        table = self.new_table(columns)
        remarks = [
            f"batch {about['batch_size']} × {about['length']} tokens",
            "of E=1: tokens/s and memory relative to the same model's; E = 1 is measured first and last, and averaged",
            "of long: tokens/s relative to one long head of the same state",
            "paper: the same ratios in Liu et al., Tables 9 and 2",
            PATH,
        ]
        for row in self.rows:
            head = [row["model"], str(row["factor"]), row["form"]]
            if "step_ms" not in row:
                without(table, remarks, head, row)
                continue
            papers = [about["paper"][key].get(str(row["factor"])) for key in ("of_one", "subheads_of_long_head")]
            papers = [None, None] if row["form"] == "long head" else papers
            table.add_row(
                *head,
                f"{row['parameters'] / 1e6:.1f} M",
                EngFormatter(places=1, sep="")(row["state_size"]),
                f"{row['tokens_per_second']:,.0f}",
                formatted(row.get("of_one"), "{:.2f}"),
                formatted(papers[0], "{:.2f}"),
                formatted(row.get("of_long_head"), "{:.2f}"),
                formatted(papers[1], "{:.2f}"),
                formatted(row["peak_gib"], "{:.1f}"),
                formatted(row.get("gib_of_one"), "{:.2f}"),
                f"{row['tflops']:.3g}",
                path_of(row, remarks),
            )
        return captioned(table, remarks)

    def picture(self) -> Figure | None:
        """Plots over E of speed and memory relative to E = 1, and of TFLOP/s, a line for each model and form."""
        rows = [row for row in self.rows if "of_one" in row]
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
                        axes.plot(
                            *points, style, color=f"C{number}", marker="o", markersize=4, label=f"{model}, {form}"
                        )
            if key == "of_one":
                paper = self.about["paper"][key]
                axes.plot(
                    [*map(int, paper)], [*paper.values()], "--", color="gray", marker="x", label="Liu et al., Table 9"
                )
            axes.set_xticks(factors, [str(factor) for factor in factors])
            axes.set_ylim(bottom=0)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        handles, labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside right center", fontsize="small")
        about = self.about
        picture.suptitle(
            f"{about['device']}, {about['precision']}, {about['batch_size']} × {about['length']}", fontsize=10
        )
        return picture


def bench_expansion(
    config: Sequence[str] = (),
    mixers: list[str] | None = None,
    sizes: list[str] | None = None,
    factors: list[int] | None = None,
    long_head: bool = True,
    batch_size: int = 8,
    length: int = 4096,
    steps: int = 8,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    folder: str = "runs/bench-expansion",
) -> Report:
    """Time training steps of models with expanded states, compared with the same models without expansion.

    Each model is measured alone, after its loss and gradients are checked in two of its layers; that of E = 1 first and
    last, and the others are compared with the mean of both.

    Args:
        config: One model, as configs and `key=value` overrides, in place of `mixers` and `sizes`.
        mixers: Models, of gated_deltanet, gla, hgrn2, mamba2; null for all of them.
        sizes: Their sizes, 400m or 1.5b; null for 400m.
        factors: Factors E; null for 2, 4, 8 and 16. E = 1 is always measured.
        long_head: Whether to measure each E with one long head, too.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.
        steps: Number of steps to time, after a few to warm up.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for bf16-true on a GPU and 32-true on a CPU.
        backend: Backend of the kernels: auto, triton, torch, reference or flashqla; null for ZOO_BACKEND, or auto.
        device: cpu or cuda; null for the GPU if available.
        folder: The folder of bench.json and bench.png.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    if where.type == "cpu":
        use_processor()
    precision = precision or ("bf16-true" if where.type == "cuda" else best_precision("cpu"))
    backend = pick_backend(backend)
    models.check_precision(precision)
    models.check_sizes(batch_size=batch_size, length=length, steps=steps)
    if config and (mixers is not None or sizes is not None):
        raise UserError("mixers, sizes: choose between them and --config, which names one model")
    items_by_name = {models.name(config): list[str](config)} if config else dict(_built_in(mixers, sizes))
    factors = [2, 4, 8, 16] if factors is None else list(dict.fromkeys(factors))
    if wrong := [factor for factor in factors if factor < 1]:
        raise UserError(f"factors: {wrong[0]} must be at least 1")
    if where.type == "cpu" and not config:
        raise UserError(
            "device: on a CPU the built-in models run out of memory; name a small one, such as "
            "--config gated_deltanet.yaml --batch_size=2 --length=256"
        )
    forms = ["subheads", *(["long head"] if long_head else [])]
    cases = [case for name, items in items_by_name.items() for case in _cases(name, items, factors, forms)]
    parsed = [models.read(case.config) for case in cases]  # all of them before the first runs
    settings = Settings(precision, backend, where, steps)
    about = {**described(where), "batch_size": batch_size, "length": length, "precision": precision, "paper": PAPER}
    report, each = ExpansionReport(Path(folder), about), 1 + WARM_UP + steps
    with tqdm(total=len(cases) * each, desc="expansion", unit=" steps", dynamic_ncols=True) as bar:
        for number, (case, one) in enumerate(zip(cases, parsed, strict=True), start=1):
            bar.set_postfix_str(case.name)
            report.rows.append(_row(case, one, settings, length, batch_size, bar))
            bar.update(number * each - bar.n)  # also where it did not fit
    _compare(report.rows)
    return report


def _built_in(mixers: list[str] | None, sizes: list[str] | None) -> Iterator[tuple[str, list[str]]]:
    """The configs of each model of each size, by name."""
    sizes = ["400m"] if sizes is None else sizes
    models.check_names("mixers", mixers or [], MODELS)
    models.check_names("sizes", sizes, SIZES)
    for size in dict.fromkeys(sizes):
        for mixer in dict.fromkeys(MODELS if mixers is None else mixers):
            base, overlay = MODELS[mixer]
            yield f"{mixer} {size}", [base, overlay.format(size)]


def _cases(name: str, items: list[str], factors: Sequence[int], forms: Sequence[str]) -> Iterator[Case]:
    """E = 1 first and last, and in between each other factor in each form."""
    one = Case(name, 1, "", [*items, "model.nominal_size=null", "model.stack.mixer.factor=1"])
    yield one
    for factor in sorted(set(factors) - {1}):
        for form in forms:
            overlays = [
                f"model.stack.mixer.factor={factor}",
                f"model.stack.mixer.subheads={form == 'subheads'}".lower(),
            ]
            yield Case(name, factor, form, [*items, "model.nominal_size=null", *overlays])
    yield one._replace(config=[*one.config])


def _row(case: Case, parsed: Any, to: Settings, length: int, batch_size: int, bar: Any) -> dict[str, Any]:
    """The measurements of one model."""
    row = {"model": case.model, "factor": case.factor, "form": case.form}
    row |= checked(case.config, parsed, to, CHECKED_LAYERS)
    return row if "note" in row else row | trained(parsed, to, length, batch_size, bar)


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add speed and memory relative to E = 1 of the same model, whose two measurements are averaged.

    With subheads, also the speed relative to one long head.
    """
    for row in rows:
        ones = [one for one in rows if one["model"] == row["model"] and one["factor"] == 1 and "step_ms" in one]
        if not ones or "step_ms" not in row:
            continue
        row["of_one"] = row["tokens_per_second"] / statistics.fmean(one["tokens_per_second"] for one in ones)
        if row["peak_gib"] is not None:
            row["gib_of_one"] = row["peak_gib"] / max(one["peak_gib"] for one in ones)
        whole = (row["model"], row["factor"], "long head")
        for long in rows:
            if (
                row["form"] == "subheads"
                and (long["model"], long["factor"], long["form"]) == whole
                and "step_ms" in long
            ):
                row["of_long_head"] = row["tokens_per_second"] / long["tokens_per_second"]
