"""StateX at a larger budget: GLA and Mamba2 of 36M parameters, grown after 105M tokens and trained on 250M more.

    PYTHONPATH=. timeout -s INT 580 python reproductions/statex_budget.py --mixers GLA --jobs=3
    E="main_effects.py --reference=LPT --where sweep=statex_after --where learning_rate=0.001"
    PYTHONPATH=. python reproductions/$E runs/statex_budget.csv --metric=val_loss
    PYTHONPATH=. python reproductions/$E runs/statex_budget.evaluations.csv --metric=value --across=length \\
      --where task=passkey

Figures 4 and 6 and Table 4 of StateX. The steps are those of tutorials/statex_end_to_end.py, on the text of
`recall/mixed.yaml`: train a model; enlarge the state of half of its layers, drawn anew (reinit) or kept (inherit);
train these and the unchanged model (LPT) on documents of 4,096 tokens, at two learning rates; evaluate passkeys and
needles up to 16k. The same command continues. Rows are added to the table as runs end. The models of the first step
stay in the folder: on another machine they are trained again, as far as rows are missing.

A mixer is 6 runs of 250M tokens after one of 105M: 21 to 27 minutes of one H200 at 1.0M to 1.3M tokens/s. Three runs at
a time end after 10 to 12 minutes, so that the machine must be held for a second call; two at a time end within ten.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels import UserError
from reproductions import sweep_rows
from reproductions.write_csv import read, write
from tutorials.statex_end_to_end import MIXERS, larger
from zoo.experiments.runner import result
from zoo.files.safe_yaml import dump_yaml

FORMS = ("LPT", "reinit", "inherit")
TEXT = "recall/mixed.yaml"
EVALUATION = (
    "--tasks=passkey,s_niah_2 --lengths=[1024,2048,4096,8192,16384] --samples=100 "
    "--haystack=corpora/mixed/test-prose.jsonl.xz"
)
LONG = {
    "data": {
        "sequence_length": 4096,
        "batch_size": 16,
        "sources": {"needles": {"path": "synthetic:needles:16000", "weight": 1, "max_characters": 60_000_000}},
    },
    "optim": {
        "schedule": "cosine",
        "warmup_steps": None,
        "warmup_fraction": 0.05,
        "min_learning_rate_ratio": 0.0,
    },
    "trainer": {"max_steps": 3815, "val_check_interval": 1000},
    "cuda_graph": True,
}


def before(mixers: Iterable[str], seeds: Sequence[int]) -> dict[str, Any]:
    """The sweep of the models that grow."""
    axis = {mixer: [MIXERS[mixer][0], TEXT, *MIXERS[mixer][1:]] for mixer in mixers}
    return {"base": ["gated_deltanet.yaml", TEXT, {"cuda_graph": True}], "axes": {"mixer": axis}, "seeds": [*seeds]}


def after(starts: dict[tuple[str, str], Path], seed: int, rates: Sequence[float]) -> dict[str, Any]:
    """The sweep of the models that are trained further, from folders by mixer and form."""
    axis = {
        f"{mixer}, {form}": [
            str(start / "config.yaml"),
            LONG,
            {"data": {"tokenizer": str(start / "tokenizer.json")}, "optim": {"initial_weights": str(start)}},
        ]
        for (mixer, form), start in starts.items()
    }
    first = str(next(iter(starts.values())) / "config.yaml")
    return {"base": first, "axes": {"start": axis}, "seeds": [seed], "learning_rates": [*rates]}


def missing(table: Path, mixers: Iterable[str], seeds: Sequence[int], rates: Sequence[float]) -> list[tuple[str, int]]:
    """The mixers and seeds that lack a row of a form and rate."""
    rows = {(row["cell"], float(row["learning_rate"]), int(row["seed"])) for row in read(table)}
    expected = [(form, rate) for form in FORMS for rate in rates]
    pairs = [(mixer, seed) for mixer in mixers for seed in seeds]
    return [(mixer, seed) for mixer, seed in pairs if any((f"{mixer}, {f}", r, seed) not in rows for f, r in expected)]


def _written(sweep: dict[str, Any], file: Path) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_yaml(sweep))
    return str(file)


def main() -> None:
    """Read the command line, and do what is left of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=[*MIXERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0e-3, 3.0e-4], help="of the second training")
    parser.add_argument("--table", type=Path, default=Path("runs/statex_budget.csv"))
    parser.add_argument("--folder", type=Path, default=Path("runs/statex_budget"), help="of the models")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on all GPUs together")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run starts")
    parser.add_argument("--evaluate", default=EVALUATION, metavar="OPTIONS", help="of `cli.py evaluate`")
    args = parser.parse_intermixed_args()
    latest = time.monotonic() + 60 * args.minutes

    def rows(sweeps: Sequence[str], table: Path, *options: str) -> None:
        minutes = max(latest - time.monotonic(), 0) / 60
        about = [f"--table={table}", f"--folder={args.folder}", f"--jobs={args.jobs}", f"--minutes={minutes}"]
        sweep_rows.main([*sweeps, *args.overrides, *about, f"--evaluate={args.evaluate}", *options])

    left = missing(args.table, args.mixers, args.seeds, args.rates)
    if not left:
        return
    mixers, seeds = (list(dict.fromkeys(part)) for part in zip(*left, strict=True))
    first = args.folder / "before.csv"  # of this machine, where the models are
    rows([_written(before(mixers, seeds), args.folder / "statex_before.yaml")], first)
    for table in (args.table, args.table.with_suffix(".evaluations.csv")):
        old, new = read(table), read(args.folder / f"before{table.name.removeprefix(args.table.stem)}")
        names = {row["name"] for row in old}
        write([*old, *(row for row in new if row["name"] not in names)], table)
    sweeps = []
    for seed in seeds:
        starts: dict[tuple[str, str], Path] = {}
        for mixer in mixers:
            run = args.folder / "statex_before" / f"mixer={mixer},seed={seed}"
            if (mixer, seed) in left and result(run) is not None:
                folders = larger({(mixer, seed): run}, args.folder / "larger", FORMS)
                starts |= {(mixer, form): folders[f"{mixer} {form} {seed}"] for form in FORMS}
        if starts:
            sweeps.append(_written(after(starts, seed, args.rates), args.folder / f"seed_{seed}" / "statex_after.yaml"))
    if sweeps:
        rows(sweeps, args.table, "--delete")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
