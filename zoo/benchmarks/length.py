"""`bench length`: training speed over the length of sequences, at the same number of tokens in a step."""

from collections.abc import Iterator, Sequence
from pathlib import Path

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

# the models of Figure 3 of "Gated Delta Networks" (arXiv 2412.06464): configs, and what their sizes are called
_PAPER, _RECIPE = "gated_delta_networks", "gated_delta_networks/recipe.yaml"
MODELS = {
    "transformer": (["transformer.yaml", _RECIPE], "transformer"),
    "deltanet": (["deltanet.yaml", _RECIPE], "transformer"),
    "gated_deltanet": ([f"{_PAPER}/gdn.yaml"], "gdn"),
    "mamba2": (["mamba2.yaml", _RECIPE], "mamba"),
    "samba": (["samba.yaml", _RECIPE], "samba"),
    "h1": ([f"{_PAPER}/h1.yaml"], "h1"),
    "h2": ([f"{_PAPER}/h2_mamba2_gdn_swa.yaml", _RECIPE], "h2_mamba2_gdn_swa"),
    "mamba1": (["mamba1.yaml", _RECIPE], "mamba"),
}
SIZES = ("0.4b", "1.3b")
CHECKED_LAYERS = 6  # each kind of layer of all hybrids
LENGTHS = [2048, 4096, 8192, 16384]


class LengthReport(Report):
    """Training over the length of sequences."""

    benchmark = "length"

    def table(self) -> Table:
        """A row for each model and length."""
        table = self.new_table(["model", "length", "batch", "params", "tok/s", "step ms", "GiB", "TFLOP/s", "path"])
        remarks = [f"{self.about['tokens']} tokens in each step", PATH]
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
    folder: str = "runs/bench-length",
) -> Report:
    """Time training steps of models at several lengths of their sequences.

    A step has the same number of tokens at each length. Each model is measured alone, after its loss and gradients are
    checked in its first layers.

    Args:
        config: One model, as configs and `key=value` overrides, in place of `mixers` and `size`.
        mixers: Models, of transformer, deltanet, gated_deltanet, mamba2, samba, h1, h2, mamba1; null for all of them.
        size: Their size, 0.4b or 1.3b.
        lengths: Tokens in a sequence; null for 2048, 4096, 8192 and 16384.
        tokens: Tokens in a step, a multiple of each length.
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
    models.check_sizes(tokens=tokens, steps=steps)
    lengths = LENGTHS if lengths is None else sorted(set(lengths))
    if wrong := [length for length in lengths if length < 1 or tokens % length]:
        raise UserError(f"lengths: {wrong[0]} does not divide the {tokens} tokens of a step (--tokens)")
    if config and (mixers is not None or size != SIZES[0]):
        raise UserError("mixers, size: choose between them and --config, which names one model")
    items_by_name = {models.name(config): list[str](config)} if config else dict(_built_in(mixers, size))
    if where.type == "cpu" and not config:
        raise UserError(
            "device: on a CPU the built-in models take hours; name a small one, such as "
            "--config gated_deltanet.yaml --tokens=512 --lengths=[256,512]"
        )
    parsed = {name: models.read(items) for name, items in items_by_name.items()}  # all of them before the first runs
    settings = Settings(precision, backend, where, steps)
    about = {**described(where), "tokens": tokens, "precision": precision}
    report, each = LengthReport(Path(folder), about), 1 + WARM_UP + steps
    with tqdm(total=len(items_by_name) * len(lengths) * each, desc="length", unit=" steps", dynamic_ncols=True) as bar:
        for name, items in items_by_name.items():
            gate = checked(items, parsed[name], settings, CHECKED_LAYERS)
            for length in lengths:
                bar.set_postfix_str(f"{name} {length}")
                row = {"model": name, "length": length, "batch_size": tokens // length, **gate}
                if "note" not in gate:
                    row |= trained(parsed[name], settings, length, tokens // length, bar)
                report.rows.append(row)
                bar.update(len(report.rows) * each - bar.n)  # also where it did not fit
    return report


def _built_in(mixers: list[str] | None, size: str) -> Iterator[tuple[str, list[str]]]:
    """The configs of each model, by name."""
    models.check_names("mixers", mixers or [], MODELS)
    models.check_names("size", [size], SIZES)
    for mixer in dict.fromkeys(MODELS if mixers is None else mixers):
        base, overlay = MODELS[mixer]
        yield mixer, [*base, f"{_PAPER}/{overlay}-{size}.yaml"]
