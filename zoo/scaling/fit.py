"""`zoo.scaling.fit`: laws out of runs, tables of them, and remarks on them."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console
from rich.table import Table

from kernels import UserError
from mixers.arguments import check_sizes
from zoo.arguments import check_names
from zoo.display import SOON, new_console, new_table, progress_bar
from zoo.files.sealed_json import read_sealed, write_sealed
from zoo.scaling.curves import PF_DAY, Curve, sizes
from zoo.scaling.law import Crossing, Law, as_row, crossings, fit_law
from zoo.scaling.optima import METHODS, Laws, Method
from zoo.scaling.power import PowerLaw
from zoo.scaling.runs import Selection, find_runs, mixed_kinds, one_rate, select, untrained

Counting = Literal["model", "6n"]
FILE = "laws.json"


def fit(
    runs: list[str] | str | Path,
    method: Method = "envelope",
    output: str | Path | None = None,
    flops: Counting = "model",
    draws: int = 200,
    seed: int = 0,
    verbose: bool = True,
) -> list[dict[str, Any]]:
    """Fit scaling laws to trained runs: how loss, best size and best number of tokens follow compute, for each mixer.

    ``zoo.scaling.fit("ladder/", method="envelope")``

    Args:
        runs: Folders of runs, folders that hold runs, such as those of a sweep, or tables of runs (CSV files, see
            docs/scaling.md); on the command line as plain arguments.
        method: `envelope`: the lowest loss at each amount of compute; `isoflop`: parabolas over size at equal compute;
            `parametric`: E + A/N^α + B/D^β.
        output: The folder for laws.json; null: `law` in the first folder, or next to the first table.
        flops: `model` counts the FLOPs that a model executes, `6n` six per token and parameter without embeddings.
        draws: Draws of the bootstrap over runs; 0: no intervals.
        seed: Seed of the draws.
        verbose: Whether to print the table and what was left out.

    Returns:
        A row for each mixer that could be fitted.

    Raises:
        UserError: A folder does not exist, a table is damaged, nothing can be fitted (the message says why), scipy is
            not installed, or the laws.json in the output is not one that this function wrote.
    """
    places = [runs] if isinstance(runs, str | Path) else list(runs)
    first = Path(places[0])
    folder = (first.parent if first.is_file() else first) / "law" if output is None else Path(output)
    if (folder / FILE).exists():
        read_sealed(folder / FILE, advice="delete it, or choose another output")
    console = new_console(verbose)
    laws, selection, failures = fitted(places, method, flops=flops, draws=draws, seed=seed, console=console)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [as_row(law) | {"counting": flops} for law in laws]
        crossed = crossings(laws)
        said = [*failures, *mixed_kinds(selection.runs), *one_rate(selection), *remarks(laws), *alike(crossed)]
        content = {"laws": rows, "crossings": [pair._asdict() for pair in crossed]}
        write_sealed(folder / FILE, content | {"left_out": selection.left_out, "remarks": said})
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written to: {error.strerror}") from None
    tables = [table(laws), *([crossing_table(crossed)] if crossed else [])]
    console.print(*tables, *said, sep="\n", highlight=False)
    console.print(str(folder / FILE), style="dim", highlight=False)
    return rows


def fitted(
    places: Sequence[str | Path], method: Method, *, flops: Counting, draws: int, seed: int, console: Console
) -> tuple[list[Law], Selection, list[str]]:
    """The laws of each mixer, the runs behind them, and why other mixers have none; `fit` describes the arguments.

    Raises:
        UserError: As for `fit`.
    """
    if importlib.util.find_spec("scipy") is None:
        raise UserError("scaling fit: needs scipy; pip install 'token-mixer-zoo[scaling]'")
    check_names("method", [method], METHODS)
    check_names("flops", [flops], get_args(Counting))
    check_sizes({"draws": draws, "seed": seed}, least=0)
    selection = select(find_runs(places), untrained(places), single_losses=method == "parametric")
    for name, reason in selection.left_out.items():
        console.print(f"left out {name}: {reason}", style="dim", highlight=False)
    curves: dict[str, list[Curve]] = {}
    for run in selection.runs:
        curve = run.curve if flops == "model" else replace(run.curve, flops_per_token=6 * run.curve.size)
        curves.setdefault(curve.mixer, []).append(curve)
    laws: list[Law] = []
    failures = []
    for of_mixer in progress_bar(
        curves.values(), desc="fitting", unit=" mixers", disable=console.quiet, delay=SOON, leave=False
    ):
        try:
            laws.append(fit_law(of_mixer, method, draws, seed))
        except UserError as error:
            failures.append(str(error))
    if not laws:
        raise UserError("; ".join(failures))
    return laws, selection, failures


FEW_SIZES = 8  # for an envelope


def table(laws: Sequence[Law]) -> Table:
    """Laws in the form of Table 3 of arXiv 2406.16690, with C in PF-days, exponents with their intervals."""
    columns = ("mixer", "L(C)", "N_opt(C)", "D_opt(C)", "runs", "a + b")
    shown = new_table(columns, wrapped=columns[1:])
    for law in laws:
        cells = [_cell(law, attrgetter(part)) for part in Laws._fields]
        shown.add_row(law.mixer, *cells, str(len(law.curves)), f"{law.laws.balance:.2f}")
    shown.caption = (
        "C in PF-days (8.64e19 FLOPs); N without embeddings; in brackets the middle 95 % of a bootstrap over runs"
    )
    return shown


def _cell(law: Law, part: Callable[[Laws], PowerLaw]) -> str:
    fitted = part(law.laws)
    coefficient = fitted.coefficient * PF_DAY**fitted.exponent
    start = f"{fitted.offset:.3f} + " if fitted.offset else ""
    interval = law.interval(lambda laws: part(laws).exponent)
    ends = "[?]" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{start}{coefficient:.4g} · C^{fitted.exponent:.4f}\n{ends}"


def crossing_table(crossings: Sequence[Crossing]) -> Table:
    """Table of crossings, one row a pair: the mixer that has the lower loss with less compute, and the one with more.

    Of two that do not cross, the better one is named in the first column, the other as `never …` in the second.
    """
    columns = ("better below", "better above", "FLOPs", "95 %", "loss", "draws that cross")
    shown = new_table(columns, left=2, wrapped=columns[2:])
    for pair in crossings:
        flops = "do not cross" if pair.flops is None else f"{pair.flops:.2g}"
        ends = "?" if pair.flops_interval is None else "{:.2g} to {:.2g}".format(*pair.flops_interval)
        loss = "" if pair.loss is None else f"{pair.loss:.3f}"
        crossed = "" if pair.crossed is None else f"{100 * pair.crossed:.0f} %"
        above = f"never {pair.mixers[1]}" if pair.flops is None else pair.mixers[1]
        shown.add_row(pair.mixers[0], above, flops, "" if pair.flops is None else ends, loss, crossed)
    low, high = crossings[0].between
    shown.caption = f"L(C) of both is equal there; looked for between {low:.2g} and {high:.2g} FLOPs"
    return shown


def remarks(laws: Sequence[Law]) -> list[str]:
    """Remarks on the laws for their readers: runs left out, offsets, balances."""
    lines = []
    for law in laws:
        if law.optima is not None and (reasons := {why: n for why, n in law.optima.left_out.items() if n}):
            number = len(law.optima.flops)
            listed = ", ".join(f"{count} since {why}" for why, count in reasons.items())
            lines.append(f"{law.mixer}: {number} amounts of compute have an optimum; without: {listed}")
        if law.offset is not None:
            power, with_offset = law.offset.errors
            better = "with an offset" if with_offset < power else "without an offset"
            lines.append(
                f"{law.mixer}: L(C) {better} predicts the largest best size better: {100 * power:.2f} % off without, "
                f"{100 * with_offset:.2f} % with ({law.offset.with_offset.offset:.3f})"
            )
        if abs(law.laws.balance - 1) > 0.1:
            lines.append(
                f"{law.mixer}: the exponents of N_opt and D_opt add up to {law.laws.balance:.2f}, so FLOPs per token "
                "do not grow as the size does"
            )
        if law.method == "envelope" and len(sizes(law.curves)) < FEW_SIZES:
            lines.append(
                f"{law.mixer}: an envelope of {len(sizes(law.curves))} sizes has steps that its intervals do not know "
                "of (without noise they shift exponents by 0.03 to 0.05); compare method=isoflop"
            )
        if law.failed_draws:
            lines.append(
                f"{law.mixer}: {law.failed_draws} of {law.failed_draws + len(law.draws)} draws could not be fitted"
            )
    return lines


def alike(crossings: Sequence[Crossing]) -> list[str]:
    """A sentence for each pair of mixers that the runs do not distinguish."""
    return [
        f"{' and '.join(pair.mixers)} cannot be told apart: at {pair.spent:.2g} FLOPs, the most that both have spent, "
        f"the loss of the second is higher by {pair.difference[0]:.3f} to {pair.difference[1]:.3f} nats"
        for pair in crossings
        if pair.difference is not None and pair.difference[0] <= 0 <= pair.difference[1]
    ]
