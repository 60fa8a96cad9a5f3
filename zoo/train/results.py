"""The results of a run: `results.json` in its folder, and a short table for the terminal."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from kernels import UserError
from zoo.display import new_table
from zoo.files.sealed_json import read_sealed

BITS = "val_bits_per_byte"
# Columns of a results row: numbers, or groups of numbers.
COLUMNS = (
    *("steps", "tokens_seen", "parameters", "parameters_without_embeddings", "context_length", "state_size"),
    *("forward_flops_per_token", "training_flops_per_token", "val_loss", "val_batches", "val_perplexity", BITS),
    *("val_loss_by_position", "val_loss_by_task", "val_accuracy", "val_accuracy_by_task", "val_loss_same_batches"),
    *("val_loss_mixers_zeroed", "bigram_loss", "tokens_per_second", "tokens_per_second_by_clock", "wall_seconds"),
    *("learning_rate", "warmup_steps", "decay_starts", "tokens_per_step"),
)
TEXTS = ("run", "status", "mixers", "schedule", "data_hash", "tokenizer_hash")


def vocabularies_differ(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether results rows are of different tokenizers, so that nats per token cannot be compared."""
    return len({row.get("tokenizer_hash") for row in rows} - {None}) > 1


def rank(value: float | None, mode: Literal["min", "max"] = "min") -> float:
    """Return the sort key of a metric, best first; NaN, and the null that files have instead, come after all numbers.

    Args:
        value: The metric, such as a validation loss.
        mode: Whether the lowest or the highest value is best.
    """
    if value is None or math.isnan(value):
        return math.inf
    return value if mode == "min" else -value


def read_row(folder: Path) -> dict[str, Any] | None:
    """The results row in a run's folder, complete or not; None if the file is missing.

    Raises:
        UserError: The file is damaged.
    """
    file = folder / "results.json"
    if not file.is_file():
        return None
    row = read_sealed(file, advice="delete it, and resuming the run writes it again")
    wrong = None if "status" in row else "it has no status"
    for name in COLUMNS:
        value = row.get(name)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not all(part is None or is_number(part) for part in parts):
            wrong = f"{name} is not a number"
    for name in TEXTS:
        if not isinstance(row.get(name), str | None):
            wrong = f"{name} is not text"
    if wrong:
        raise UserError(f"{file} is damaged ({wrong}); delete it, and resuming the run writes it again.")
    return row


def is_number(value: Any) -> bool:
    """Return whether a value read from JSON is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def result_table(row: Mapping[str, Any]) -> Table:
    """A short table of a results row: is the loss below the bigram model's, do context and mixers help?"""
    batches, in_split = row.get("val_batches"), row.get("val_batches_in_split")
    remarks = []
    if batches != in_split:
        remarks.append(f"validation on {batches} of {in_split} batches (trainer.limit_val_batches)")
    if (speed := row.get("tokens_per_second_by_clock")) is not None:
        remarks.append(f"{speed:,.0f} tokens/s by the clock, including validation and saving")
    caption = "\n".join(remarks) or None
    title = f"{row['run']}: {row['steps']} steps, {row['tokens_seen']:,} tokens"
    bits = row.get(BITS)
    table = _loss_table(title, bits, caption)
    by_position = [loss for loss in row["val_loss_by_position"] if loss is not None]
    classified = len(by_position) == 1 and row.get("val_accuracy") is not None  # whole sequences, one label each
    lines = {
        "validation": row["val_loss"],
        "interpolated bigram model": row["bigram_loss"],
        "validation, first part of the context": by_position[0] if by_position and not classified else None,
        "validation, last part of the context": by_position[-1] if by_position and not classified else None,
        "validation, first batches only": row["val_loss_same_batches"],
        "first batches, all mixers zeroed": row["val_loss_mixers_zeroed"],
    }
    for name, value in (row.get("val_loss_by_task") or {}).items():
        lines[f"validation, {_spelt(name)}"] = value
    if row["val_loss"] is None and batches:
        table.add_row("validation", "not finite")
    for name, value in lines.items():
        if value is not None:
            table.add_row(name, f"{value:.3f}", *([f"{bits:.3f}"] if bits and name == "validation" else []))
    by_task = row.get("val_accuracy_by_task")
    if by_task or classified:
        table.add_section()
        for name, value in {"all together": row.get("val_accuracy"), **(by_task or {})}.items():
            if value is not None:
                table.add_row(f"accuracy, {_spelt(name)}", f"{value:.1%}")
    return table


def metrics_table(metrics: Mapping[str, float], run: str) -> Table:
    """A table like `result_table` of the metrics of the verbs `validate` and `test` on a run of this name."""
    data = "test" if any(name.startswith("test_") for name in metrics) else "validation"
    values = {name.removeprefix("val_").removeprefix("test_"): value for name, value in metrics.items()}
    parts = sorted((name for name in values if name.startswith("loss_position_")), key=lambda name: int(name[14:]))
    lines = {"loss": data}
    if len(parts) > 1:
        lines |= {parts[0]: f"{data}, first part of the context", parts[-1]: f"{data}, last part of the context"}
    lines |= {name: f"{data}, {_spelt(name[5:])}" for name in values if name.startswith("loss_") and name not in parts}
    title = f"{run}: {values['tokens']:,.0f} tokens" if "tokens" in values else run
    table = _loss_table(title, bits := values.get("bits_per_byte"))
    for name, words in lines.items():
        if name in values:
            shown = f"{values[name]:.3f}" if math.isfinite(values[name]) else "not finite"
            table.add_row(words, shown, *([f"{bits:.3f}"] if bits and name == "loss" else []))
    table.add_section()
    for name, value in values.items():
        if name == "perplexity":
            table.add_row(name, f"{value:.1f}")
        elif name.startswith("accuracy"):
            table.add_row(", ".join(filter(None, ("accuracy", _spelt(name[9:])))), f"{value:.1%}")
    return table


def _loss_table(title: str, bits: float | None, caption: str | None = None) -> Table:
    """A table of losses, with a column for bits per byte if they are measured."""
    columns = ["loss", "nats per token", *(["bits per byte"] if bits else [])]
    return new_table(columns, box=box.HEAVY_HEAD, title=title, caption=caption)


def _spelt(name: str) -> str:
    return name.replace("_", " ")
