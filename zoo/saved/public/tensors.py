"""Rules that map public tensors (`theirs`) to our tensors (`ours`), and weights that follow them when they are read.

Names in rules may contain `{layer}`, which a family's table fills in.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.checkpoints.tensor_files import Spec, Weights


@dataclass(frozen=True)
class Rows:
    """The rows of one public tensor are those of one or several of our tensors, one after another.

    Attributes:
        theirs: Their name.
        ours: Our names, in the order of the rows. Those that our model lacks are left out; if it lacks them all, so
            must theirs.
        per: The attribute of the mixer that counts groups of rows, such as `num_key_heads`: each group then holds its
            share of each of our tensors, in order. None for one group.
        of: Our mixer in whose layers the rule applies, by class name; None for any.
        aliases: Other public names for it, which are read as well.
    """

    theirs: str
    ours: tuple[str, ...]
    per: str | None = None
    of: str | None = None
    aliases: tuple[str, ...] = ()

    def join(self, parts: Sequence[Tensor], groups: int) -> Tensor:
        """Ours → theirs."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def split(self, tensor: Tensor, rows: Sequence[int], groups: int) -> list[Tensor]:
        """Theirs → ours, of these numbers of rows."""
        if len(rows) == 1:
            return [tensor]
        parts = tensor.unflatten(0, (groups, -1)).split([count // groups for count in rows], 1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True)
class Shared:
    """One public tensor, of which each of several of our layers has a copy under the name `ours`, with `{layer}`."""

    theirs: str
    ours: str


@dataclass(frozen=True)
class Tied:
    """A public tensor that must equal another one if it is stored, unless our model has the tensor `unless`."""

    theirs: str
    equals: str
    unless: str


@dataclass(frozen=True)
class Recut:
    """The rows of several public tensors, one after another, may be divided differently, or be one tensor `whole`."""

    theirs: tuple[str, ...]
    whole: str


Rule = Rows | Shared | Tied | Recut


def rows(theirs: str, *ours: str, per: str | None = None, of: str | None = None, aliases: Sequence[str] = ()) -> Rows:
    """One public tensor that holds one or several of our tensors; see `Rows`."""
    return Rows(theirs, ours, per, of, tuple(aliases))


def around_layers(embeddings: str, norm: str) -> tuple[Rule, ...]:
    """The rules of embeddings, the last norm, and the head, which may be tied to the embeddings."""
    head = "lm_head.weight"
    tied = Tied(head, embeddings, unless=head)
    return rows(embeddings, "embeddings.weight"), rows(norm, "norm.weight"), rows(head, head), tied


class ComputedWeights:
    """Weights with known shapes and dtypes, of which each is computed by `read` when it is needed."""

    def __init__(self, specs: Mapping[str, Spec], read: Callable[[str], Tensor]):
        self.specs, self.tensor = specs, read


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Weights with other names (old → new); where both exist, both stay."""
    old = {names[name]: name for name in weights.specs if name in names and names[name] not in weights.specs}
    sources = {**{name: name for name in weights.specs if name not in old.values()}, **old}
    specs = {new: weights.specs[name] for new, name in sources.items()}
    return ComputedWeights(specs, lambda new: weights.tensor(sources[new]))


def recut(weights: Weights, rules: Iterable[Recut], shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Weights in which the tensors of each rule are cut as `shapes` says, if their rows are as many."""
    specs = dict(weights.specs)
    cuts: dict[str, tuple[tuple[str, ...], int, int]] = {}  # the tensors whose rows it has, and which of them
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
            cuts[name] = sources, end - shape[0], end

    def read(name: str) -> Tensor:
        if name not in cuts:
            return weights.tensor(name)
        sources, start, end = cuts[name]
        return torch.cat([weights.tensor(source) for source in sources])[start:end]

    return ComputedWeights(specs, read)


def _same_rows(stored: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> bool:
    """Return whether tensors of these shapes have as many rows together, of the same shape."""
    if any(not shape or shape[1:] != wanted[0][1:] for shape in [*stored, *wanted]):
        return False
    return sum(shape[0] for shape in stored) == sum(shape[0] for shape in wanted)
