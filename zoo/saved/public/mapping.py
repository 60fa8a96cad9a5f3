"""A family's table of tensors, filled in for one model: public weights under our names and in our shapes, and back."""

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kernels import UserError
from zoo.checkpoints.tensor_files import Spec, Weights
from zoo.display import short_list
from zoo.lm.model import LanguageModel
from zoo.saved.public.family import Family
from zoo.saved.public.tensors import ComputedWeights, Link, Place, Recut, Rule, Tied, origins, recut, renamed

log = logging.getLogger(__name__)

_listed = functools.partial(short_list, separator=", ")
_Direction = tuple[tuple[str, ...], tuple[str, ...], Callable[[Sequence[Tensor]], Sequence[Tensor]]]


class TensorMap:
    """Table of which of our tensors corresponds to which public tensor, for one model on the meta device.

    A UserError if the family has no place for a tensor of the model.
    """

    def __init__(self, family: Family, model: LanguageModel):
        self.family = family
        self.ours: dict[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self.links: list[Link] = []
        self.tied: list[Tied] = []
        self.recuts: list[Recut] = []
        for rule in family.tensors:
            self._bind(rule, Place(self.ours))
        for layer, mixer in enumerate(model.mixers):
            for rule in family.layer_tensors:
                self._bind(rule, Place(self.ours, layer, mixer))
        covered = {name for link in self.links for name in link.ours}
        if missing := [name for name in self.ours if name not in covered]:
            raise UserError(f"to: {family.name} has no place for {_listed(missing)} of this model.")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for link in self.links:
            theirs = link.join([torch.empty(self.ours[name], device="meta") for name in link.ours])
            self.shapes |= {name: tuple(tensor.shape) for name, tensor in zip(link.theirs, theirs, strict=True)}

    def _bind(self, rule: Rule, place: Place) -> None:
        if isinstance(rule, Tied):
            if rule.unless not in self.ours:
                self.tied.append(rule)
        elif isinstance(rule, Recut):
            self.recuts.append(Recut(place.named(rule.theirs), *place.named((rule.whole,))))
        elif (link := rule.link(place)) is not None:
            self.links.append(link)

    def as_ours(self, theirs: Weights, source: object) -> Weights:
        """The weights in the public folder `source` under our names.

        A UserError if tensors are missing, left over or of other shapes, or tied ones differ.
        """
        aliases = {alias: name for link in self.links for alias, name in link.aliases.items()}
        theirs = recut(renamed(theirs, aliases), self.recuts, self.shapes)
        self._check(theirs, source)
        return _computed(((link.ours, link.theirs, link.split) for link in self.links), theirs, self.ours)

    def as_theirs(self, ours: Weights) -> Weights:
        """Our weights under their names."""
        return _computed(((link.theirs, link.ours, link.join) for link in self.links), ours, self.shapes)

    def _check(self, theirs: Weights, source: object) -> None:
        shapes, specs = self.shapes, theirs.specs
        if missing := [name for name in shapes if name not in specs]:
            raise UserError(f"checkpoint: {source} lacks {_listed(missing)}.")
        named = shapes.keys() | {rule.theirs for rule in self.tied}
        others = [name for name in specs if name not in named]
        ignored = [name for name in others if any(re.search(pattern, name) for pattern in self.family.ignored)]
        if extra := [name for name in others if name not in ignored]:
            raise UserError(f"checkpoint: {source} holds {_listed(extra)}, for which {self.family.name} has no place.")
        if wrong := [name for name, shape in shapes.items() if specs[name].shape != shape]:
            differences = [f"{name} {list(specs[name].shape)} instead of {list(shapes[name])}" for name in wrong]
            raise UserError(
                f"checkpoint: {source} has tensors of other shapes than its config says: {_listed(differences)}."
            )
        for rule in self.tied:
            if rule.theirs in specs and not torch.equal(theirs.tensor(rule.theirs), theirs.tensor(rule.equals)):
                raise UserError(
                    f"checkpoint: {source} ties {rule.theirs} to {rule.equals} by its config, but they differ."
                )
        if ignored:
            log.warning("%s has no use for %s of %s, which are left out.", self.family.name, _listed(ignored), source)


def _computed(links: Iterable[_Direction], sources: Weights, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Weights of these shapes, made from others: `links` are names, the names that they are made from, and how."""
    places = {name: (link, i) for link in links for i, name in enumerate(link[0])}

    def dtype(name: str) -> torch.dtype:
        (_, origins, _), _ = places[name]
        return functools.reduce(torch.promote_types, [sources.specs[origin].dtype for origin in origins])

    specs = {name: Spec(shapes[name], dtype(name)) for name in places}

    def read(name: str) -> Tensor:
        (_, origins, convert), i = places[name]
        return convert([sources.tensor(origin).to(specs[name].dtype) for origin in origins])[i]

    return ComputedWeights(specs, read, {name: origins(sources, *link[1]) for name, (link, _) in places.items()})
