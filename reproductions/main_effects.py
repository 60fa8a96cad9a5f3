"""Main effects of the axes of a sweep, from the rows that `sweep_rows.py` wrote.

    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.csv --metric=pairs_at_50 --seeds=2,3,4,5,6
    PYTHONPATH=. python reproductions/main_effects.py runs/sweep_rows.evaluations.csv --metric=value --across=length \
      --where task=s_niah_2 --reference=Mamba2

The effect of a level is the mean over all cells that have it minus the mean over those that have the first level of the
axis, formed within a seed; the interval is the 95 % t interval over seeds. Seeds are used if each cell has exactly one
row, as `--chosen-on` leaves them. Lines with "in" are about the cells that have that level of another axis. `--where`
chooses rows by their columns, `--across` repeats all for each value of a column, and `--reference` names another level
than the first one of its axis.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scipy.stats import t

from mixers import did_you_mean
from reproductions.write_csv import read

Cell = tuple[str, ...]
Values = Mapping[int, Mapping[Cell, float]]  # seed → cell → value


def read_values(rows: Sequence[Mapping[str, str]], metric: str, seeds: Sequence[int] | None) -> Values:
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
        reference: The level that the others of its axis are compared with; None: the first one.
    """
    cells = [*next(iter(values.values()))]
    axes = [list(dict.fromkeys(levels)) for levels in zip(*cells, strict=True)]
    axes = [sorted(levels, key=lambda level: level != reference) for levels in axes]
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


def main() -> None:
    """Print the effects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--metric", default="val_accuracy")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", help="rows to read")
    parser.add_argument("--across", metavar="COLUMN", help="such as length")
    parser.add_argument("--reference", metavar="LEVEL")
    args = parser.parse_args()
    rows = read(args.table)
    chosen = [condition.partition("=")[::2] for condition in args.where]
    for column in [args.metric, *(column for column, _ in chosen), *([args.across] if args.across else [])]:
        if rows and column not in rows[0]:
            sys.exit(f"{args.table} has no column {column!r}{did_you_mean(column, rows[0])}")
    rows = [row for row in rows if all(row[column] == value for column, value in chosen)]
    parts = {row[args.across] if args.across else "": None for row in rows}
    for part in parts or [""]:
        values = read_values([row for row in rows if not part or row[args.across] == part], args.metric, args.seeds)
        if not values:
            sys.exit(f"{args.table}: no seed has exactly one row for every cell{part and f' at {args.across} {part}'}")
        title = f"{args.across} {part}: " if part else ""
        lines = [f"{title}{args.metric}, seeds {', '.join(map(str, values))}"]
        if args.reference:
            of_level = [x for of_seed in values.values() for cell, x in of_seed.items() if args.reference in cell]
            if not of_level:
                sys.exit(f"--reference: no cell has the level {args.reference!r}")
            lines.append(f"{args.reference:45} {statistics.mean(of_level):.3f}")
        for name, mean, half in effects(values, args.reference):
            sure = "" if abs(mean) > half else "  (the interval contains 0)"
            lines.append(f"{name:45} {mean:+.3f}" + (f" ± {half:.3f}{sure}" if len(values) > 1 else ", one seed"))
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
