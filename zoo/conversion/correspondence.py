"""A family's table, filled in for one model: weights in their names and shapes as ours, and ours as theirs."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels import UserError
from zoo.checkpoints.tensor_files import Spec, Weights
from zoo.conversion.family import Family
from zoo.conversion.rules import Recut, Rows, Rule, Shared, Tied
from zoo.conversion.view import View, recut, renamed
from zoo.lm.model import LanguageModel

log = logging.getLogger(__name__)

_MOST_NAMED = 5  # tensors in a message


class Correspondence:
    """Table of which of our tensors corresponds to which public tensor, for one model.

    Args:
        family: Whose table.
        model: Our model, on the meta device.

    Raises:
        UserError: The table has no place for a tensor of the model.
    """

    def __init__(self, family: Family, model: LanguageModel):
        self.family = family
        self.ours: dict[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self.rows: list[tuple[Rows, int]] = []  # with the number of groups
        self.shared: list[tuple[Shared, list[str]]] = []  # with our names
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
        covered = {name for rule, _ in self.rows for name in rule.ours} | {n for _, names in self.shared for n in names}
        if left := [name for name in self.ours if name not in covered]:
            raise UserError(f"to: {family.name} has no place for {_listed(left)} of this model.")

    def _bind(self, rule: Rule, groups: int) -> None:
        if isinstance(rule, Tied):
            if rule.unless not in self.ours:
                self.tied.append(rule)
        elif isinstance(rule, Shared):
            pattern = re.escape(rule.ours).replace(re.escape("{layer}"), r"\d+")
            if names := [name for name in self.ours if re.fullmatch(pattern, name)]:
                self.shared.append((rule, names))
        elif isinstance(rule, Recut):
            self.recuts.append(rule)
        elif ours := tuple(name for name in rule.ours if name in self.ours):
            self.rows.append((replace(rule, ours=ours), groups))

    def as_ours(self, theirs: Weights, source: object) -> Weights:
        """Their weights under our names.

        Args:
            theirs: The weights in a public folder.
            source: The folder, for messages.

        Raises:
            UserError: Tensors are missing, left over or of other shapes; or tied ones differ.
        """
        aliases = {alias: rule.theirs for rule, _ in self.rows for alias in rule.aliases}
        theirs = recut(renamed(theirs, aliases), self.recuts, dict(self._expected()))
        self._check(theirs, source)
        specs: dict[str, Spec] = {}
        place: dict[str, tuple[Rows, int, int] | str] = {}  # a part of a rule, or their name
        for rule, groups in self.rows:
            for i, name in enumerate(rule.ours):
                place[name] = rule, groups, i
                specs[name] = Spec(self.ours[name], theirs.specs[rule.theirs].dtype)
        for shared, names in self.shared:
            for name in names:
                place[name] = shared.theirs
                specs[name] = Spec(self.ours[name], theirs.specs[shared.theirs].dtype)

        def read(name: str) -> Tensor:
            origin = place[name]
            if isinstance(origin, str):
                return theirs.tensor(origin)
            rule, groups, i = origin
            counts = [self.ours[part][0] for part in rule.ours]
            return rule.split(theirs.tensor(rule.theirs), counts, groups)[i]

        return View({name: specs[name] for name in self.ours}, read)

    def as_theirs(self, ours: Weights) -> Weights:
        """Our weights under their names."""
        specs: dict[str, Spec] = {}
        place: dict[str, tuple[Rows, int]] = {}
        first = {shared.theirs: names[0] for shared, names in self.shared}
        for rule, groups in self.rows:
            specs[rule.theirs] = Spec(self._shape(rule, groups), self._dtype(rule, ours))
            place[rule.theirs] = rule, groups
        for theirs, name in first.items():
            specs[theirs] = ours.specs[name]

        def read(name: str) -> Tensor:
            if name in first:
                return ours.tensor(first[name])
            rule, groups = place[name]
            dtype = specs[name].dtype
            return rule.join([ours.tensor(part).to(dtype) for part in rule.ours], groups)

        return View(specs, read)

    def _shape(self, rule: Rows, groups: int) -> tuple[int, ...]:
        return tuple(rule.join([torch.empty(self.ours[n], device="meta") for n in rule.ours], groups).shape)

    @staticmethod
    def _dtype(rule: Rows, ours: Weights) -> torch.dtype:
        dtypes = [ours.specs[name].dtype for name in rule.ours]
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for rule, groups in self.rows:
            yield rule.theirs, self._shape(rule, groups)
        for shared, names in self.shared:
            yield shared.theirs, self.ours[names[0]]

    def _check(self, theirs: Weights, source: object) -> None:
        expected, specs = dict(self._expected()), theirs.specs
        if missing := [name for name in expected if name not in specs]:
            raise UserError(f"checkpoint: {source} lacks {_listed(missing)}.")
        known_names = expected.keys() | {rule.theirs for rule in self.tied}
        others = [name for name in specs if name not in known_names]
        left = [name for name in others if any(re.search(pattern, name) for pattern in self.family.ignored)]
        if extra := [name for name in others if name not in left]:
            raise UserError(f"checkpoint: {source} holds {_listed(extra)}, for which {self.family.name} has no place.")
        if wrong := [name for name, shape in expected.items() if specs[name].shape != shape]:
            shapes = [f"{name} {list(specs[name].shape)} instead of {list(expected[name])}" for name in wrong]
            raise UserError(
                f"checkpoint: {source} has tensors of other shapes than its config says: {_listed(shapes)}."
            )
        for rule in self.tied:
            if rule.theirs in specs and not torch.equal(theirs.tensor(rule.theirs), theirs.tensor(rule.equals)):
                raise UserError(
                    f"checkpoint: {source} ties {rule.theirs} to {rule.equals} by its config, but they differ."
                )
        if left:
            log.warning("%s has no use for %s of %s, which are left out.", self.family.name, _listed(left), source)


def _numbered(names: tuple[str, ...], layer: int) -> tuple[str, ...]:
    """Names with the number of a layer in place of `{layer}`."""
    return tuple(name.format(layer=layer) for name in names)


def _listed(names: list[str]) -> str:
    """Several names, or the first of many."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
