"""Training speed for tables and figures of two papers: of larger states, and over the length of sequences.

    python reproductions/bench.py expansion --mixers=[gated_deltanet,gla] --sizes=[400m]
    python reproductions/bench.py length --mixers=[gated_deltanet,mamba2,h1] --lengths=[2048,4096,8192,16384]

`expansion` times E = 1, 2, 4 …, with subheads and with one long head, and `length` recurrent models, attention and
hybrids. `python reproductions/bench.py expansion --help` lists its options. Each writes bench.json and bench.png.
"""

import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table
from tqdm import tqdm

from kernels import UserError
from reproductions.pictured_report import PicturedReport
from zoo import config as configs
from zoo.arguments import check_names
from zoo.config.command_line import Keys, arguments_of
from zoo.display import new_figure
from zoo.performance import model as models
from zoo.performance.accuracy import Gate
from zoo.performance.bench_report import PATH, Report, captioned, formatted, path_of, show, without
from zoo.performance.device import described, pick_backend
from zoo.performance.training import DOES_NOT_FIT, WARM_UP, TimedLearner, check_graph, timed, warmed
from zoo.train.callbacks.throughput import TRAINING_FLOPS
from zoo.train.devices import pick_device, use_processor
from zoo.train.module import best_precision

MOST_LEFT = 1  # GiB


class Settings(NamedTuple):
    """Settings that all models have in common."""

    precision: str
    backend: str
    device: torch.device
    steps: int
    cuda_graph: bool


def checked(parsed: Any, to: Settings) -> dict[str, Any]:
    """The gate of a row: whether loss and gradients are right in the lowest layers of each kind, with a note if not."""
    if note := occupied(to.device):
        return {"note": note}
    try:
        gate = _gate(parsed, to)
    except torch.OutOfMemoryError:
        return {"note": DOES_NOT_FIT}
    return {"gate": gate.record()} | ({} if gate.passed else {"note": gate.says})


def _gate(parsed: Any, to: Settings) -> Gate:
    """The comparison of `checked`."""
    model = models.conditioned(models.lowest_layers(models.build(parsed, to.precision, to.device)))
    return models.compared(model, to.precision, to.backend, models.learning)


def allocated(device: torch.device) -> float:
    """GiB in use, of a GPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def occupied(device: torch.device) -> str | None:
    """Why a model cannot be measured alone: what one that did not fit has left in memory, or None.

    Not all that PyTorch had allocated when it ran out of memory is always free again.
    """
    left = allocated(device)
    if left < MOST_LEFT:
        return None
    return f"not measured: {left:.0f} GiB are still allocated since a model did not fit; name this one alone"


def trained(parsed: Any, to: Settings, length: int, batch_size: int, bar: Any) -> dict[str, Any]:
    """Sizes, times and memory of a model in training; a note in place of times if it does not fit.

    Args:
        parsed: The config.
        to: Precision, backend, device, number of steps, and whether they are captured.
        length: Tokens in a sequence.
        batch_size: Sequences in a step.
        bar: A progress bar of steps.
    """
    if note := occupied(to.device):
        return {"note": note}
    try:
        return _steps(parsed, to, length, batch_size, bar)
    except torch.OutOfMemoryError:
        return {"note": DOES_NOT_FIT}
    finally:  # the next model starts with free memory
        gc.collect()
        if to.device.type == "cuda":
            torch.cuda.empty_cache()


def _steps(parsed: Any, to: Settings, length: int, batch_size: int, bar: Any) -> dict[str, Any]:
    """Measure the steps of one model. As a separate function, it frees the model before the next is built."""
    model = models.build(parsed, to.precision, to.device)
    tokens = torch.randint(parsed.model.vocab_size, (batch_size, length + 1), device=to.device)
    optim = configs.instantiate("optim", parsed)
    learner = TimedLearner(
        model, optim, to.precision, to.backend, lambda: models.mean_loss(model, tokens), cuda_graph=to.cuda_graph
    )
    row: dict[str, Any] = {"parameters": model.num_parameters(), "state_size": model.state_size(length)}
    if warmed(row, learner, bar):
        timed([(row, learner)], to.steps, bar)
        if learner.captured is not None:
            row["not_captured"] = learner.captured.refused
        row |= learner.measured(batch_size * length)
        row["tflops"] = TRAINING_FLOPS * model.flops(length) / length * row["tokens_per_second"] / 1e12
    return row


# the models of Liu et al., and two more: a config, and what its overlays in configs/size are called
EXPANDED = {
    "gated_deltanet": ("state_expansion/gated_deltanet.yaml", "size/{}.yaml"),
    "gla": ("state_expansion/gla.yaml", "size/{}.yaml"),
    "hgrn2": ("hgrn2.yaml", "size/transformer-{}.yaml"),
    "mamba2": ("mamba2.yaml", "size/mamba-{}.yaml"),
}
EXPANDED_SIZES = ("400m", "1.5b")
# Liu et al.: training with subheads relative to E = 1 (Table 9, machine and model not named); with subheads relative to
# one long head (Table 2, one H800); TFLOP/s of the recurrences alone at (4, 8, 4096, 128) (Table 10, one H800)
PAPER = {
    "of_one": {"1": 1.0, "2": 0.57, "4": 0.40, "8": 0.21},
    "subheads_of_long_head": {"8": 15722 / 9569, "16": 6554 / 2933},
    "kernel_tflops": {"attention": 213, "gla": 21, "gated_deltanet": 25},
}


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


class ExpansionReport(PicturedReport):
    """Training with expanded states."""

    benchmark = "expansion"

    def table(self) -> Table:
        """A row for each model, factor and form."""
        about = self.about
        columns = ["model", "E", "form", "params", "state", "tok/s", "of E=1", "paper", "of long", "paper"]
        columns += ["GiB", "of E=1", "TFLOP/s", "path"]
        table = self.new_table(columns)
        remarks = [
            f"batch {about['batch_size']} × {about['length']} tokens{', captured' if about['cuda_graph'] else ''}",
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
        picture = new_figure(1.5 + 4.2 * len(panels), 4.2)
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
    cuda_graph: bool = False,
    folder: str = "runs/bench-expansion",
) -> Report:
    """Time training steps of models with expanded states, compared with the same models without expansion.

    Each model is measured alone, after its loss and gradients are checked in its lowest layers; that of E = 1 first and
    last, and the others are compared with the mean of both.

    Args:
        config: One model, as configs and `key=value` overrides, in place of `mixers` and `sizes`.
        mixers: Models, of gated_deltanet, gla, hgrn2, mamba2; null for all of them.
        sizes: Their sizes, 400m or 1.5b; null for 400m.
        factors: Factors E; null for 2, 4, 8 and 16. E = 1 is always measured.
        long_head: Whether to measure each E with one long head, too.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.
        steps: Number of steps to time, after a few others; on a GPU after four seconds of them, or 100.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for bf16-true on a GPU and 32-true on a CPU.
        backend: Backend of the kernels: auto, triton, torch or reference; null for ZOO_BACKEND, or auto.
        device: cpu or cuda; null for the GPU if available.
        cuda_graph: Whether to capture the steps as CUDA graphs, on a GPU.
        folder: The folder of bench.json and bench.png.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    if where.type == "cpu":
        use_processor()
    precision = precision or ("bf16-true" if where.type == "cuda" else best_precision("cpu"))
    backend = pick_backend(backend)
    check_graph(cuda_graph, where)
    models.check_options(precision, batch_size=batch_size, length=length, steps=steps)
    if config and (mixers is not None or sizes is not None):
        raise UserError("mixers, sizes: choose between them and --config, which names one model")
    items_by_name = {models.name(config): list[str](config)} if config else dict(_expanded(mixers, sizes))
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
    settings = Settings(precision, backend, where, steps, cuda_graph)
    about = {**described(where), "batch_size": batch_size, "length": length, "precision": precision}
    about |= {"cuda_graph": cuda_graph, "paper": PAPER}
    report, each = ExpansionReport(Path(folder), about), 1 + WARM_UP + steps
    with tqdm(total=len(cases) * each, desc="expansion", unit=" steps", dynamic_ncols=True) as bar:
        for number, (case, one) in enumerate(zip(cases, parsed, strict=True), start=1):
            bar.set_postfix_str(case.name)
            report.add(_row(case, one, settings, length, batch_size, bar))
            bar.update(number * each - bar.n)  # also where it did not fit
    _compare(report.rows)
    return report


def _expanded(mixers: list[str] | None, sizes: list[str] | None) -> Iterator[tuple[str, list[str]]]:
    """The configs of each model of each size, by name."""
    sizes = ["400m"] if sizes is None else sizes
    check_names("mixers", mixers or [], EXPANDED)
    check_names("sizes", sizes, EXPANDED_SIZES)
    for size in dict.fromkeys(sizes):
        for mixer in dict.fromkeys(EXPANDED if mixers is None else mixers):
            base, overlay = EXPANDED[mixer]
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
    row |= checked(parsed, to)
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


# the models of Figure 3 of "Gated Delta Networks" (arXiv 2412.06464): configs, and what their sizes are called
_PAPER, _RECIPE = "gated_delta_networks", "gated_delta_networks/recipe.yaml"
OVER_LENGTH = {
    "transformer": (["transformer.yaml", _RECIPE], "transformer"),
    "deltanet": (["deltanet.yaml", _RECIPE], "transformer"),
    "gated_deltanet": ([f"{_PAPER}/gdn.yaml"], "gdn"),
    "mamba2": (["mamba2.yaml", _RECIPE], "mamba"),
    "samba": (["samba.yaml", _RECIPE], "samba"),
    "h1": ([f"{_PAPER}/h1.yaml"], "h1"),
    "h2": ([f"{_PAPER}/h2_mamba2_gdn_swa.yaml", _RECIPE], "h2_mamba2_gdn_swa"),
    "mamba1": (["mamba1.yaml", _RECIPE], "mamba"),
}
OVER_LENGTH_SIZES = ("0.4b", "1.3b")
LENGTHS = [2048, 4096, 8192, 16384]


class LengthReport(PicturedReport):
    """Training over the length of sequences."""

    benchmark = "length"

    def table(self) -> Table:
        """A row for each model and length."""
        table = self.new_table(["model", "length", "batch", "params", "tok/s", "step ms", "GiB", "TFLOP/s", "path"])
        captured = ", captured" if self.about["cuda_graph"] else ""
        remarks = [f"{self.about['tokens']} tokens in each step{captured}", PATH]
        for row in self.rows:
            head = [row["model"], str(row["length"]), str(row["batch_size"])]
            if "step_ms" not in row:
                without(table, remarks, head, row)
                continue
            table.add_row(
                *head,
                f"{row['parameters'] / 1e6:.1f} M",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['step_ms']:.1f}",
                formatted(row["peak_gib"], "{:.1f}"),
                f"{row['tflops']:.3g}",
                path_of(row, remarks),
            )
        return captioned(table, remarks)

    def picture(self) -> Figure | None:
        """A plot of tokens per second over the length of sequences, a line for each model; None for a single length."""
        rows = [row for row in self.rows if "step_ms" in row]
        lengths = sorted({row["length"] for row in rows})
        if len(lengths) < 2:
            return None
        about = self.about
        picture = new_figure(8, 4.5)
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


def bench_length(
    config: Sequence[str] = (),
    mixers: list[str] | None = None,
    size: str = "0.4b",
    lengths: list[int] | None = None,
    tokens: int = 32768,
    steps: int = 8,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    cuda_graph: bool = False,
    folder: str = "runs/bench-length",
) -> Report:
    """Time training steps of models at several lengths of their sequences.

    A step has the same number of tokens at each length. Each model is measured alone, after its loss and gradients are
    checked in its lowest layers of each kind.

    Args:
        config: One model, as configs and `key=value` overrides, in place of `mixers` and `size`.
        mixers: Models, of transformer, deltanet, gated_deltanet, mamba2, samba, h1, h2, mamba1; null for all of them.
        size: Their size, 0.4b or 1.3b.
        lengths: Tokens in a sequence; null for 2048, 4096, 8192 and 16384.
        tokens: Tokens in a step, a multiple of each length.
        steps: Number of steps to time, after a few others; on a GPU after four seconds of them, or 100.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for bf16-true on a GPU and 32-true on a CPU.
        backend: Backend of the kernels: auto, triton, torch or reference; null for ZOO_BACKEND, or auto.
        device: cpu or cuda; null for the GPU if available.
        cuda_graph: Whether to capture the steps as CUDA graphs, on a GPU.
        folder: The folder of bench.json and bench.png.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    if where.type == "cpu":
        use_processor()
    precision = precision or ("bf16-true" if where.type == "cuda" else best_precision("cpu"))
    backend = pick_backend(backend)
    check_graph(cuda_graph, where)
    models.check_options(precision, tokens=tokens, steps=steps)
    lengths = LENGTHS if lengths is None else sorted(set(lengths))
    if wrong := [length for length in lengths if length < 1 or tokens % length]:
        raise UserError(f"lengths: {wrong[0]} does not divide the {tokens} tokens of a step (--tokens)")
    if config and (mixers is not None or size != OVER_LENGTH_SIZES[0]):
        raise UserError("mixers, size: choose between them and --config, which names one model")
    items_by_name = {models.name(config): list[str](config)} if config else dict(_over_length(mixers, size))
    if where.type == "cpu" and not config:
        raise UserError(
            "device: on a CPU the built-in models take hours; name a small one, such as "
            "--config gated_deltanet.yaml --tokens=512 --lengths=[256,512]"
        )
    parsed = {name: models.read(items) for name, items in items_by_name.items()}  # all of them before the first runs
    settings = Settings(precision, backend, where, steps, cuda_graph)
    about = {**described(where), "tokens": tokens, "precision": precision, "cuda_graph": cuda_graph}
    report, each = LengthReport(Path(folder), about), 1 + WARM_UP + steps
    with tqdm(total=len(items_by_name) * len(lengths) * each, desc="length", unit=" steps", dynamic_ncols=True) as bar:
        for name, one in parsed.items():
            gate = checked(one, settings)
            for length in lengths:
                bar.set_postfix_str(f"{name} {length}")
                row = {"model": name, "length": length, "batch_size": tokens // length, **gate}
                if "note" not in gate:
                    row |= trained(one, settings, length, tokens // length, bar)
                report.add(row)
                bar.update(len(report.rows) * each - bar.n)  # also where it did not fit
    return report


def _over_length(mixers: list[str] | None, size: str) -> Iterator[tuple[str, list[str]]]:
    """The configs of each model, by name."""
    check_names("mixers", mixers or [], OVER_LENGTH)
    check_names("size", [size], OVER_LENGTH_SIZES)
    for mixer in dict.fromkeys(OVER_LENGTH if mixers is None else mixers):
        base, overlay = OVER_LENGTH[mixer]
        yield mixer, [*base, f"{_PAPER}/{overlay}-{size}.yaml"]


KINDS = {"expansion": bench_expansion, "length": bench_length}


def main(arguments: list[str]) -> int:
    """Run the benchmark named by the first argument; return 1 if a result was wrong."""
    kind, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if kind in ("-h", "--help"):
        sys.stdout.write(str(__doc__))
        return 0
    check_names("kind", [kind], KINDS)
    items, options = arguments_of(KINDS[kind], rest, f"bench {kind}", Keys(configs.KEYS, lambda parser: None))
    return int(show(KINDS[kind](items, **options)).failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
