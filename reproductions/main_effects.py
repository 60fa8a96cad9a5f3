"""Main effects of the axes of a factorial sweep, from the rows that `sweep_rows.py` wrote.

    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv --metric=pairs_at_50 --seeds=2,3,4,5,6
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv --beside="H = 8, E = 1"

The effect of a level is the mean over all cells that have it minus the mean over those that have the first level of the
axis, formed within a seed; the interval is the 95 % t interval over seeds. Seeds are used if each cell has exactly one
row, as `--chosen-on` leaves them. Lines with "in" are about the cells that have that level of another axis.

`--beside` compares each cell with one cell: differences are formed within a seed and a learning rate, and averaged over
the learning rates that both cells have.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scipy.stats import t

from reproductions.write_csv import read

Cell = tuple[str, ...]
Values = Mapping[int, Mapping[Cell, float]]  # seed → cell → value


def read_values(table: Path, metric: str, seeds: Sequence[int] | None) -> dict[int, dict[Cell, float]]:
    """The metric of each cell by seed; of seeds that have one row for every cell."""
    values: dict[int, dict[Cell, list[float]]] = {}
    for row in read(table):
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


def effects(values: Values) -> Iterator[tuple[str, float, float]]:
    """Each level with its effect and half the interval, over all cells and within each level of another axis."""
    cells = [*next(iter(values.values()))]
    axes = [list(dict.fromkeys(levels)) for levels in zip(*cells, strict=True)]
    for place, levels in enumerate(axes):
        others = [(i, level) for i, of_axis in enumerate(axes) if i != place for level in of_axis]
        for level, within in itertools.product(levels[1:], [None, *others]):
            differences = []
            for of_seed in values.values():
                there = {c: x for c, x in of_seed.items() if within is None or c[within[0]] == within[1]}
                means = [statistics.mean(x for c, x in there.items() if c[place] == one) for one in (level, levels[0])]
                differences.append(means[0] - means[1])
            name = f"{level} − {levels[0]}" + ("" if within is None else f", in {within[1]}")
            yield name, *interval(differences)


def beside(table: Path, metric: str, seeds: Sequence[int] | None, other: str) -> Iterator[tuple[str, float, float]]:
    """Each cell with its mean difference from the cell `other` and half the interval."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    for row in read(table):
        if seeds is None or int(row["seed"]) in seeds:
            of_cell = values.setdefault(row["cell"], {})
            of_cell.setdefault(int(row["seed"]), {})[row["learning_rate"]] = float(row[metric])
    if other not in values:
        sys.exit(f"{table}: no cell is named {other!r}; its cells are {', '.join(map(repr, values))}")
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
    parser.add_argument("--beside", help="the cell that all others are compared with, in place of effects of axes")
    args = parser.parse_args()
    if args.beside:
        lines, found = [args.metric], beside(args.table, args.metric, args.seeds, args.beside)
    else:
        values = read_values(args.table, args.metric, args.seeds)
        if not values:
            sys.exit(f"{args.table}: no seed has exactly one row for every cell")
        lines, found = [f"{args.metric}, seeds {', '.join(map(str, values))}"], effects(values)
    for name, mean, half in found:
        sure = "" if abs(mean) > half else "  (the interval contains 0)"
        lines.append(f"{name:45} {mean:+.3f} ± {half:.3f}{sure}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
