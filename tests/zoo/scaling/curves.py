"""Made-up ladders of runs whose law is known, as curves and as folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.files.sealed_json import write_sealed
from zoo.scaling.curves import Curve
from zoo.scaling.parametric import CHINCHILLA, Parametric

SIZES = tuple(np.geomspace(1e7, 3e9, 6))
DENSE = tuple(np.geomspace(1e6, 1e10, 33))


def ladder(
    law: Parametric,
    sizes: Sequence[float] = SIZES,
    tokens: tuple[float, float] = (2e8, 6e10),
    points: int = 200,
    seeds: int = 1,
    between_runs: float = 0.0,
    within_runs: float = 0.0,
    rng: int = 0,
) -> list[Curve]:
    """Runs with 6·N FLOPs per token, whose losses differ from the law by factors exp(noise)."""
    generator = np.random.default_rng(rng)
    curves = []
    for size in sizes:
        for seed in range(seeds):
            at = np.geomspace(*tokens, points)
            noise = between_runs * generator.standard_normal() + within_runs * generator.standard_normal(points)
            losses = law(np.full(points, size), at) * np.exp(noise)
            curves.append(Curve(f"{size:.0f}-{seed}", "M", size, 6 * size, at, losses))
    return curves


def write_run(folder: Path, size: float = 1e7, points: int = 60, law: Parametric = CHINCHILLA, **row: Any) -> Path:
    """The folder of a run of `points` logged steps that follows a law; `row` changes its results."""
    folder.mkdir(parents=True)
    tokens_per_step = 1_000_000_000
    results = {
        "run": folder.name,
        "status": "complete",
        "steps": points,
        "mixers": "M",
        "parameters_without_embeddings": size,
        "training_flops_per_token": 6 * size,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "warmup_steps": 2,
        "decay_starts": points,
        "data_hash": "abc",
        "context_length": 512,
        "seed": 0,
    } | row
    write_sealed(folder / "results.json", {name: value for name, value in results.items() if value is not None})
    tokens = tokens_per_step * np.arange(1, points + 1)
    losses = law(np.full(points, size), tokens)
    rows = [
        {"step": step, "tokens": int(seen), "train_loss": float(loss)}
        for step, (seen, loss) in enumerate(zip(tokens, losses, strict=True))
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
