"""Weights seen under other names, and cut at other rows; nothing is read before it is needed."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zoo.checkpoints.tensor_files import Spec, Weights
from zoo.conversion.rules import Recut


class View:
    """Weights under other names, each computed when it is read.

    Args:
        specs: Name → shape and dtype.
        read: Name → tensor.
    """

    def __init__(self, specs: Mapping[str, Spec], read: Callable[[str], Tensor]):
        self.specs, self.tensor = specs, read


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Weights with other names (old → new); where both are there, both stay."""
    old = {names[name]: name for name in weights.specs if name in names and names[name] not in weights.specs}
    sources = {**{name: name for name in weights.specs if name not in old.values()}, **old}
    return View({new: weights.specs[name] for new, name in sources.items()}, lambda new: weights.tensor(sources[new]))


def recut(weights: Weights, rules: Iterable[Recut], shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Weights in which the tensors of each rule are cut as `shapes` says, if their rows are as many."""
    specs = dict(weights.specs)
    made: dict[str, tuple[tuple[str, ...], int, int]] = {}  # the tensors whose rows it has, and which of them
    for rule in rules:
        whole = rule.whole in specs and not any(name in specs for name in rule.theirs)
        sources = (rule.whole,) if whole else rule.theirs
        if not all(name in shapes for name in rule.theirs) or not all(name in specs for name in sources):
            continue
        wanted, stored = [shapes[name] for name in rule.theirs], [specs[name] for name in sources]
        if [spec.shape for spec in stored] == wanted or not _same_rows([spec.shape for spec in stored], wanted):
            continue  # either as it should be, or for the check of shapes to refuse
        for name in sources:
            del specs[name]
        ends = itertools.accumulate(shape[0] for shape in wanted)
        for name, shape, end in zip(rule.theirs, wanted, ends, strict=True):
            specs[name] = Spec(shape, stored[0].dtype)
            made[name] = sources, end - shape[0], end

    def read(name: str) -> Tensor:
        if name not in made:
            return weights.tensor(name)
        sources, start, end = made[name]
        return torch.cat([weights.tensor(source) for source in sources])[start:end]

    return View(specs, read)


def _same_rows(stored: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> bool:
    """Return whether tensors of these shapes have as many rows together, of the same shape."""
    if any(not shape or shape[1:] != wanted[0][1:] for shape in [*stored, *wanted]):
        return False
    return sum(shape[0] for shape in stored) == sum(shape[0] for shape in wanted)
