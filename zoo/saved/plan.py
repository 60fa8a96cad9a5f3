"""The plan of a conversion, which `convert --dry-run` shows: what each tensor and each key becomes."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.markup import escape

from zoo.checkpoints.tensor_files import Weights
from zoo.display import new_console, new_table
from zoo.saved.public.tensors import origins

Row = tuple[str, ...]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def row(sources: Sequence[str], target: str, shape: Sequence[int], number_type: str) -> Row:
    """Return the row of a tensor that is written, and of those that it is made from; layers have no number."""
    names = (_LAYER.sub("*", name) for name in (" + ".join(sources) or "computed", target))
    return *names, " × ".join(map(str, shape)), number_type.removeprefix("torch.")


def rows_of(weights: Weights) -> list[Row]:
    """Return the rows of weights that are written; their tensors are not read."""
    return [row(origins(weights, name), name, spec.shape, str(spec.dtype)) for name, spec in weights.specs.items()]


def show_plan(output: Path, tensors: Iterable[Row], config: str = "", keys: Iterable[Row] = ()) -> Path:
    """Print the keys that are read, with their values and what they do, the tensors and the config of `output`.

    Returns `output`, to which nothing is written.
    """
    of_keys = new_table(("key", "value", "here"), left=3, wrapped=("value",))
    for key in keys:
        of_keys.add_row(*map(escape, key))
    of_tensors = new_table(("from", "to", "shape", "type", "tensors"), left=2, wrapped=("from", "to"))
    for cells, count in Counter(tensors).items():
        of_tensors.add_row(*map(escape, cells), str(count))
    for part in (*([of_keys] if of_keys.rows else []), of_tensors, config):
        new_console().print(part, markup=False, highlight=False)
    return output
