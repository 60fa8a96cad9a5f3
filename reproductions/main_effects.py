"""Main effects of the axes of a sweep, from the rows that `sweep_rows.py` wrote.

    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv --metric=pairs_at_50 --seeds=2,3,4,5,6
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv --beside="H = 8, E = 1"
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.evaluations.csv --metric=value --across=length \\
      --where task=s_niah_2 --reference=Mamba2

The effect of a level is the mean over all cells that have it minus the mean over those that have the first level of the
axis (or `--reference`), formed within a seed; the interval is the 95 % t interval over seeds. Seeds are used if each
cell has exactly one row, as `--chosen-on` leaves them. Lines with "in" are about the cells that have that level of
another axis. A control takes part if it is the reference, with which each cell is then compared.

`--beside=CELL` compares every other cell with this one: differences are formed within a seed and a learning rate,
and averaged over the learning rates that both cells have. `--gate val_accuracy_by_task.pairs_4=0.95` leaves out runs
that did not learn the task (`gates` of a sweep). `--where` chooses rows by their columns, and `--across` repeats all of
it for each value of a column, over which `--picture` draws the means of the cells, with a dot for each seed.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scipy.stats import t

from kernels import UserError
from mixers import did_you_mean
from reproductions.write_csv import read
from zoo.display import write_figure
from zoo.evaluation.results import curves

Rows = Sequence[Mapping[str, str]]
Cell = tuple[str, ...]
Values = Mapping[int, Mapping[Cell, float]]  # seed → cell → value


def read_values(rows: Rows, metric: str, seeds: Sequence[int] | None) -> Values:
    """The metric of each cell by seed; of seeds that have one row for every cell."""
    values: dict[int, dict[Cell, list[float]]] = {}
    for row in rows:
        cell = tuple(row["cell"].split(", "))
        values.setdefault(int(row["seed"]), {}).setdefault(cell, []).append(float(row[metric]))
    cells = {cell for of_seed in values.values() for cell in of_seed}
    return {
        seed: {cell: numbers[0] for cell, numbers in of_seed.items()}
        for seed, of_seed in sorted(values.items())
        if {*of_seed} == cells
        and all(len(numbers) == 1 for numbers in of_seed.values())
        and (seeds is None or seed in seeds)
    }


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % t interval."""
    n = len(differences)
    half = t.ppf(0.975, n - 1) * statistics.stdev(differences) / n**0.5 if n > 1 else float("nan")
    return statistics.mean(differences), half


def effects(values: Values, reference: str | None = None) -> Iterator[tuple[str, float, float]]:
    """Each level with its effect and half the interval, over all cells and within each level of another axis.

    Args:
        values: The metric.
        reference: The level that the others of its axis are compared with, or a control; None: the first level.

    Raises:
        UserError: A cell of the factorial has no value.
    """
    cells = [*next(iter(values.values()))]
    count = max(map(len, cells))
    cells, controls = ([c for c in cells if (len(c) == count) == full] for full in (True, False))
    if reference is not None and (reference,) in controls:
        for cell in cells:
            differences = [of_seed[cell] - of_seed[reference,] for of_seed in values.values()]
            yield f"{', '.join(cell)} − {reference}", *interval(differences)
        return
    axes = [list(dict.fromkeys(levels)) for levels in zip(*cells, strict=True)]
    axes = [sorted(levels, key=lambda level: level != reference) for levels in axes]
    if missing := [cell for cell in itertools.product(*axes) if cell not in cells]:
        raise UserError(f"no rows of {', '.join(missing[0])}; choose rows by --where, or compare cells by --beside")
    for place, levels in enumerate(axes):
        others = [(i, level) for i, of_axis in enumerate(axes) if i != place for level in of_axis]
        for level, within in itertools.product(levels[1:], [None, *others]):
            differences = []
            for of_seed in values.values():
                there = {c: of_seed[c] for c in cells if within is None or c[within[0]] == within[1]}
                means = [statistics.mean(x for c, x in there.items() if c[place] == one) for one in (level, levels[0])]
                differences.append(means[0] - means[1])
            name = f"{level} − {levels[0]}" + ("" if within is None else f", in {within[1]}")
            yield name, *interval(differences)


def beside(rows: Rows, metric: str, seeds: Sequence[int] | None, other: str) -> Iterator[tuple[str, float, float]]:
    """Each cell with its mean difference from the cell `other` and half the interval."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        if seeds is None or int(row["seed"]) in seeds:
            of_cell = values.setdefault(row["cell"], {})
            of_cell.setdefault(int(row["seed"]), {})[row["learning_rate"]] = float(row[metric])
    if other not in values:
        sys.exit(f"--beside: no cell is named {other!r}; the cells are {', '.join(map(repr, values))}")
    for cell, of_cell in values.items():
        differences = []
        for seed, rates in of_cell.items():
            shared = [rates[rate] - x for rate, x in values[other].get(seed, {}).items() if rate in rates]
            differences += [statistics.mean(shared)] if shared else []
        if cell != other and differences:
            yield f"{cell} − {other}", *interval(differences)


def main() -> None:
    """Print the effects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--metric", default="val_accuracy")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--reference", metavar="LEVEL", help="the level that the others of its axis are compared with")
    parser.add_argument("--beside", help="the cell that all others are compared with, in place of effects of axes")
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", help="rows to read")
    parser.add_argument("--gate", metavar="COLUMN=LEAST", help="leave out rows below this number")
    parser.add_argument("--across", metavar="COLUMN", help="such as length")
    parser.add_argument("--picture", type=Path, help="file for curves over the column of --across")
    parser.add_argument("--title", help="of the picture (default: the name of the table)")
    args = parser.parse_args()
    if args.picture and not args.across:
        sys.exit("--picture: --across must name the horizontal axis, such as length")
    rows, chosen = read(args.table), [condition.partition("=")[::2] for condition in args.where]
    gate, _, least = (args.gate or "").partition("=")
    for column in filter(None, (args.metric, *(column for column, _ in chosen), args.across, gate)):
        if rows and column not in rows[0]:
            sys.exit(f"{args.table} has no column {column!r}{did_you_mean(column, rows[0])}")
    rows = [row for row in rows if all(row[column] == value for column, value in chosen)]
    rows = [row for row in rows if not gate or float(row[gate]) >= float(least)]
    if args.seeds is not None:
        rows = [row for row in rows if int(row["seed"]) in args.seeds]
    if args.picture:
        points = [
            {"model": row["cell"], "metric": row.get("metric", args.metric), "value": float(row[args.metric])}
            | {args.across: float(row[args.across])}
            for row in rows
        ]
        write_figure(curves(points, args.across, args.title or args.table.stem), args.picture)
    parts = dict.fromkeys(row[args.across] if args.across else "" for row in rows)
    for part in parts or [""]:
        of_part = [row for row in rows if not part or row[args.across] == part]
        title = f"{args.across} {part}: " if part else ""
        try:
            sys.stdout.write(title + "\n".join(report(of_part, args)) + "\n")
        except UserError as error:
            sys.exit(f"{args.table}: {error}")


def report(rows: Rows, args: argparse.Namespace) -> Iterator[str]:
    """The lines about some rows."""
    if args.beside:
        yield args.metric
        found = beside(rows, args.metric, args.seeds, args.beside)
    else:
        values = read_values(rows, args.metric, args.seeds)
        if not values:
            sys.exit(f"{args.table}: no seed has exactly one row for every cell")
        yield f"{args.metric}, seeds {', '.join(map(str, values))}"
        found = effects(values, args.reference)
        if args.reference:
            of_level = [x for of_seed in values.values() for cell, x in of_seed.items() if args.reference in cell]
            if not of_level:
                sys.exit(f"--reference: no cell has the level {args.reference!r}")
            yield f"{args.reference:45} {statistics.mean(of_level):.3f}"
    for name, mean, half in found:
        sure = "" if abs(mean) > half else "  (the interval contains 0)"
        yield f"{name:45} {mean:+.3f}" + (", one seed" if math.isnan(half) else f" ± {half:.3f}{sure}")


if __name__ == "__main__":
    main()
