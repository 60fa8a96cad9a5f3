"""Time per decoded token of the models of 400M parameters, and its floor, for a table in docs/which_mixer.md.

    python reproductions/decode_400m.py
    python reproductions/decode_400m.py --models=[kda,gla] --fla=true

The first command times each model as `bench decode` does, which checks its logits first: after 1k and 64k tokens, on a
GPU as CUDA graphs. The floor is the time in which the memory's bandwidth moves weights and states. The second times
flash-linear-attention's models of the same mixers, where it has them. Rows are written model by model, and what the
file has is not measured again, so a run that was stopped continues.
"""

import gc
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels import UserError
from reproductions import beside, peers, script, write_csv
from reproductions.mixers_400m import SETTINGS, overlays
from zoo.arguments import check_above_0, check_names
from zoo.config.serialise import to_dict
from zoo.performance.bench_report import complaint
from zoo.performance.decoding import bench_decode
from zoo.performance.device import described
from zoo.performance.model import build, check_options, read
from zoo.train.devices import pick_device

MEASURED = Path(__file__).parent / "measured" / "decode_400m.csv"
COLUMNS = ("model", "batch_size", "position", "ms", "floor_ms", "ratio", "state_bytes", *SETTINGS, "note")
Row = dict[str, Any]
Place = tuple[int, int]


def ours(config: list[str], places: list[Place], device: torch.device, seconds: float) -> list[Row]:
    """Return a model's rows: of CUDA graphs where its steps can be captured, otherwise of eager steps."""
    batch_sizes, positions = (list(dict.fromkeys(numbers)) for numbers in zip(*places, strict=True))
    folder = f"runs/decode_400m/{Path(config[0]).stem}"
    report = bench_decode(config, batch_sizes, positions, device=device.type, seconds=seconds, folder=folder)
    return [report.about | row for row in report.rows]


def of_fla(config: list[str], places: list[Place], device: torch.device, seconds: float) -> list[Row]:
    """Return the rows of flash-linear-attention's model of the same mixers, decoded eagerly; none if it has none."""
    parsed = read(config)
    peer = peers.same_model(build(parsed, "32-true", torch.device("meta")), to_dict(parsed)["model"], device)
    about = described(device) | {"precision": "bf16-true"}
    rows = [] if peer is None else beside.decoded(peer, about["precision"], places, device, seconds)
    return [about | row for row in rows]


def decode_400m(
    models: list[str] | None = None,
    batch_sizes: list[int] | None = None,
    positions: list[int] | None = None,
    fla: bool = False,
    device: str | None = None,
    each: float = 0.5,
    seconds: float | None = None,
    file: str = str(MEASURED),
) -> None:
    """Write the time per decoded token of models of 400M parameters.

    Args:
        models: Names of configs, such as kda; null for all that have an overlay of 400M.
        batch_sizes: Sequences in a batch; null for 1 and 64.
        positions: Numbers of preceding tokens; null for 1024 and 65536, or with `fla` for 1024.
        fla: Whether to time flash-linear-attention's models instead; it tunes its kernels first, for minutes.
        device: cpu or cuda; null for the GPU if available.
        each: Seconds to time each setting.
        seconds: Time after which no further model is measured; null for no limit.
        file: The CSV to update.

    Raises:
        UserError: An argument is invalid, or models could not be measured, which the others are nevertheless.
    """
    start, target, available, where = time.monotonic(), Path(file), overlays(), pick_device(device)
    check_names("models", models or [], available)
    check_above_0("each", each)
    every = [*itertools.product(batch_sizes or [1, 64], positions or ([beside.POSITION] if fla else [1024, 65536]))]
    for batch_size, position in every:
        check_options("bf16-true", batch_sizes=batch_size, positions=position)
    if fla:
        peers.require(where)
    rows = {_key(row): dict[str, Any](row) for row in write_csv.read(target, COLUMNS)}
    failed = dict[str, str]()
    for name in models or available:
        label = f"fla {name}" if fla else name
        places = [place for place in every if (label, *place) not in rows]
        if not places or (seconds is not None and time.monotonic() - start > seconds):
            continue
        try:
            measured = (of_fla if fla else ours)([f"{name}.yaml", available[name]], places, where, each)
        except Exception as error:  # the other models can be measured
            failed[label] = complaint(error)
            continue
        finally:
            gc.collect()  # graphs and models refer to each other
        for row in measured:  # a graph's row replaces that of eager steps
            if (row["batch_size"], row["position"]) not in places:
                continue  # measured before
            ms, floor = row.get("ms"), row.get("floor_ms")
            row |= {"model": label, "ratio": ms / floor if ms and floor else None}
            rows[_key(row)] = {column: row.get(column) for column in COLUMNS}
            sys.stdout.write(f"{label}: batch {row['batch_size']}, position {row['position']}, {ms} ms\n")
        sys.stdout.flush()
        write_csv.write([rows[key] for key in sorted(rows)], target, COLUMNS)
    sys.stdout.write(f"rows: {target}\n")
    if failed:
        raise UserError("; ".join(f"{label}: {reason}" for label, reason in failed.items()))


def _key(row: Row) -> tuple[str, int, int]:
    return row["model"], int(row["batch_size"]), int(row["position"])


if __name__ == "__main__":
    script.run(decode_400m)
