"""Rules that map public tensors (`theirs`) to our tensors (`ours`), and weights that follow them when they are read.

Names in rules may contain `{layer}`, which a family's table fills in.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mixers import TokenMixer
from zoo.checkpoints.tensor_files import Spec, Weights


class Place(NamedTuple):
    """A model in which a rule applies, by the shapes of its tensors; for a rule of layers, one layer and its mixer."""

    shapes: Mapping[str, tuple[int, ...]]
    layer: int | None = None
    mixer: TokenMixer | None = None

    def named(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names with the number of the layer in place of `{layer}`."""
        return tuple(names if self.layer is None else (name.format(layer=self.layer) for name in names))


class Link(NamedTuple):
    """A rule filled in for one model: public tensors that hold what our tensors hold.

    Attributes:
        theirs: Their names.
        ours: Our names.
        join: Ours → theirs, all of them in order.
        split: Theirs → ours.
        aliases: Other public names → those in `theirs`.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    split: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    aliases: Mapping[str, str] = {}


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
        shape: Their shape where it has other axes than ours: sizes, -1 for what is left, and attributes of the mixer.
    """

    theirs: str
    ours: tuple[str, ...]
    per: str | None = None
    of: str | None = None
    aliases: tuple[str, ...] = ()
    shape: tuple[int | str, ...] | None = None

    def link(self, place: Place) -> Link | None:
        """The rule in one place; None if our model has no such tensor there."""
        mixer = place.mixer
        ours = tuple(name for name in place.named(self.ours) if name in place.shapes)
        if not ours or self.of not in (None, type(mixer).__name__):
            return None
        shapes = [place.shapes[name] for name in ours]
        groups = 1 if self.per is None else getattr(mixer, self.per, 1)
        axes = [getattr(mixer, axis) if isinstance(axis, str) else axis for axis in self.shape or ()]

        def join(parts: Sequence[Tensor]) -> list[Tensor]:
            whole = parts[0]
            if len(parts) > 1:
                whole = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
            return [whole.reshape(axes) if axes else whole]

        def split(whole: Sequence[Tensor]) -> list[Tensor]:
            if len(shapes) == 1:
                return [whole[0].reshape(shapes[0])]
            counts = [shape[0] // groups for shape in shapes]
            parts = whole[0].unflatten(0, (groups, -1)).split(counts, 1)
            return [part.flatten(0, 1) for part in parts]

        theirs, *aliases = place.named((self.theirs, *self.aliases))
        return Link((theirs,), ours, join, split, dict.fromkeys(aliases, theirs))


@dataclass(frozen=True)
class Stacked:
    """Several public tensors of one shape are the rows of one of our tensors. `shape` is theirs, as for `Rows`."""

    theirs: tuple[str, ...]
    ours: str
    shape: tuple[int, ...]

    def link(self, place: Place) -> Link | None:
        """The rule in one place; None if our model has no such tensor there."""
        (ours,) = place.named((self.ours,))
        if ours not in place.shapes:
            return None

        def join(ours: Sequence[Tensor]) -> list[Tensor]:
            return [row.reshape(self.shape) for row in ours[0]]

        def split(rows: Sequence[Tensor]) -> list[Tensor]:
            return [torch.stack([row.flatten() for row in rows])]

        return Link(place.named(self.theirs), (ours,), join, split)


@dataclass(frozen=True)
class Shared:
    """One public tensor, of which each of several of our layers has a copy under the name `ours`, with `{layer}`."""

    theirs: str
    ours: str

    def link(self, place: Place) -> Link | None:
        """The rule in a model; None if our model has no such tensor."""
        pattern = re.escape(self.ours).replace(re.escape("{layer}"), r"\d+")
        if not (ours := tuple(name for name in place.shapes if re.fullmatch(pattern, name))):
            return None
        return Link((self.theirs,), ours, lambda copies: copies[:1], lambda one: [one[0]] * len(ours))


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


Rule = Rows | Stacked | Shared | Tied | Recut


LAYER, OUR_LAYER = "model.layers.{layer}.", "layers.{layer}."


def table(
    names: Mapping[str, str], theirs: str = LAYER, ours: str = OUR_LAYER, of: str | None = None
) -> tuple[Rows, ...]:
    """The rules of a layer's tensors (theirs → ours, several separated by spaces); the names are without prefixes."""
    return tuple(
        Rows(theirs + name, tuple(ours + part for part in parts.split()), of=of) for name, parts in names.items()
    )


def around_layers(embeddings: str, norm: str) -> tuple[Rule, ...]:
    """The rules of embeddings, the last norm, and the head, which may be tied to the embeddings."""
    head = "lm_head.weight"
    tied = Tied(head, embeddings, unless=head)
    named = {embeddings: "embeddings.weight", norm: "norm.weight", head: head}
    return *table(named, "", ""), tied


class ComputedWeights:
    """Weights with known shapes and dtypes, of which each is computed by `read` when it is needed.

    `sources` has the names that a tensor is made from, where they are known.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        read: Callable[[str], Tensor],
        sources: Mapping[str, Sequence[str]] | None = None,
    ):
        self.specs, self.tensor, self.sources = specs, read, sources or {}


def origins(weights: Weights, *names: str) -> list[str]:
    """Return the names of the tensors that some are made from; their own where none are known."""
    sources = weights.sources if isinstance(weights, ComputedWeights) else {}
    return [origin for name in names for origin in sources.get(name, [name])]


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Weights with other names (old → new); where both exist, both stay."""
    old = {names[name]: name for name in weights.specs if name in names and names[name] not in weights.specs}
    sources = {**{name: name for name in weights.specs if name not in old.values()}, **old}
    specs = {new: weights.specs[name] for new, name in sources.items()}
    made_from = {new: origins(weights, name) for new, name in sources.items()}
    return ComputedWeights(specs, lambda new: weights.tensor(sources[new]), made_from)


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
        if [spec.shape for spec in stored] == wanted:
            continue
        row = stored[0].shape[1:]
        counts, wanted_counts = (
            [_rows(shape, row) for shape in of] for of in ([spec.shape for spec in stored], wanted)
        )
        if 0 in (*counts, *wanted_counts) or sum(counts) != sum(wanted_counts):
            continue  # for the check of shapes to refuse
        for name in sources:
            del specs[name]
        ends = itertools.accumulate(wanted_counts)
        for name, shape, count, end in zip(rule.theirs, wanted, wanted_counts, ends, strict=True):
            specs[name] = Spec(shape, stored[0].dtype)
            cuts[name] = sources, end - count, end

    def read(name: str) -> Tensor:
        if name not in cuts:
            return weights.tensor(name)
        sources, start, end = cuts[name]
        return torch.cat([weights.tensor(source) for source in sources])[start:end].reshape(specs[name].shape)

    made_from = {name: origins(weights, *(cuts[name][0] if name in cuts else [name])) for name in specs}
    return ComputedWeights(specs, read, made_from)


def _rows(shape: tuple[int, ...], row: tuple[int, ...]) -> int:
    """The number of rows of shape `row` in a tensor; 0 if it does not consist of such rows."""
    before = len(shape) - len(row)
    return math.prod(shape[:before]) if before > 0 and shape[before:] == row else 0
