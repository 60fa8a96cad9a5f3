"""A family's table of tensors, filled in for one model: public weights under our names and in our shapes, and back."""

import functools
import logging
import re
from dataclasses import replace

import torch
from torch import Tensor

from kernels import UserError
from zoo.checkpoints.tensor_files import Spec, Weights
from zoo.lm.model import LanguageModel
from zoo.saved.public.family import Family
from zoo.saved.public.tensors import ComputedWeights, Recut, Rows, Rule, Shared, Tied, recut, renamed

log = logging.getLogger(__name__)

_MAX_NAMES = 5  # tensors in a message


class TensorMap:
    """Table of which of our tensors corresponds to which public tensor, for one model on the meta device.

    A UserError if the family has no place for a tensor of the model.
    """

    def __init__(self, family: Family, model: LanguageModel):
        self.family = family
        self.ours: dict[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self.rows: dict[str, tuple[Rows, int]] = {}  # their name → rule and number of groups
        self.shared: dict[str, list[str]] = {}  # their name → our names
        self.tied: list[Tied] = []
        self.recuts: list[Recut] = []
        for rule in family.tensors:
            self._bind(rule, 1)
        for layer, mixer in enumerate(model.mixers):
            for rule in family.layer_tensors:
                if isinstance(rule, Recut):
                    self._bind(Recut(_numbered(rule.theirs, layer), rule.whole.format(layer=layer)), 1)
                    continue
                assert isinstance(rule, Rows), "a tensor shared by layers belongs in `tensors`"
                if rule.of not in (None, type(mixer).__name__):
                    continue
                (theirs,), ours = _numbered((rule.theirs,), layer), _numbered(rule.ours, layer)
                groups = 1 if rule.per is None else getattr(mixer, rule.per, 1)
                self._bind(replace(rule, theirs=theirs, ours=ours, aliases=_numbered(rule.aliases, layer)), groups)
        covered = {name for rule, _ in self.rows.values() for name in rule.ours}.union(*self.shared.values())
        if missing := [name for name in self.ours if name not in covered]:
            raise UserError(f"to: {family.name} has no place for {_listed(missing)} of this model.")
        self.shapes = {theirs: self._shape(rule, groups) for theirs, (rule, groups) in self.rows.items()}
        self.shapes |= {theirs: self.ours[names[0]] for theirs, names in self.shared.items()}

    def _bind(self, rule: Rule, groups: int) -> None:
        if isinstance(rule, Tied):
            if rule.unless not in self.ours:
                self.tied.append(rule)
        elif isinstance(rule, Shared):
            pattern = re.escape(rule.ours).replace(re.escape("{layer}"), r"\d+")
            if names := [name for name in self.ours if re.fullmatch(pattern, name)]:
                self.shared[rule.theirs] = names
        elif isinstance(rule, Recut):
            self.recuts.append(rule)
        elif ours := tuple(name for name in rule.ours if name in self.ours):
            self.rows[rule.theirs] = replace(rule, ours=ours), groups

    def as_ours(self, theirs: Weights, source: object) -> Weights:
        """The weights in the public folder `source` under our names.

        A UserError if tensors are missing, left over or of other shapes, or tied ones differ.
        """
        aliases = {alias: rule.theirs for rule, _ in self.rows.values() for alias in rule.aliases}
        theirs = recut(renamed(theirs, aliases), self.recuts, self.shapes)
        self._check(theirs, source)
        places = {name: (theirs, i) for theirs, (rule, _) in self.rows.items() for i, name in enumerate(rule.ours)}
        places |= {name: (theirs, 0) for theirs, names in self.shared.items() for name in names}

        def read(name: str) -> Tensor:
            origin, part = places[name]
            tensor = theirs.tensor(origin)
            if origin in self.shared:
                return tensor
            rule, groups = self.rows[origin]
            return rule.split(tensor, [self.ours[ours][0] for ours in rule.ours], groups)[part]

        specs = {name: Spec(shape, theirs.specs[places[name][0]].dtype) for name, shape in self.ours.items()}
        return ComputedWeights(specs, read)

    def as_theirs(self, ours: Weights) -> Weights:
        """Our weights under their names."""
        specs: dict[str, Spec] = {}
        for theirs, (rule, _) in self.rows.items():
            dtypes = [ours.specs[name].dtype for name in rule.ours]
            specs[theirs] = Spec(self.shapes[theirs], functools.reduce(torch.promote_types, dtypes))
        specs |= {theirs: ours.specs[names[0]] for theirs, names in self.shared.items()}

        def read(theirs: str) -> Tensor:
            if theirs in self.shared:
                return ours.tensor(self.shared[theirs][0])
            rule, groups = self.rows[theirs]
            return rule.join([ours.tensor(name).to(specs[theirs].dtype) for name in rule.ours], groups)

        return ComputedWeights(specs, read)

    def _shape(self, rule: Rows, groups: int) -> tuple[int, ...]:
        return tuple(rule.join([torch.empty(self.ours[name], device="meta") for name in rule.ours], groups).shape)

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


def _numbered(names: tuple[str, ...], layer: int) -> tuple[str, ...]:
    """Names with the number of a layer in place of `{layer}`."""
    return tuple(name.format(layer=layer) for name in names)


def _listed(names: list[str]) -> str:
    """Several names, or the first of many."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
