"""`zoo.scaling.fit`: laws out of runs."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from kernels import UserError
from mixers.arguments import check_sizes
from zoo.arguments import check_names
from zoo.display import SOON, new_console, progress_bar
from zoo.files.sealed_json import read_sealed, write_sealed
from zoo.scaling.curves import Curve
from zoo.scaling.law import Law, as_row, crossings, fit_law
from zoo.scaling.optima import METHODS, Method
from zoo.scaling.runs import Selection, find_runs, mixed_kinds, one_rate, select, untrained
from zoo.scaling.tables import alike, crossing_table, remarks, table

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
