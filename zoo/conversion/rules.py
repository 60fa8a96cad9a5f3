"""Rules that map tensors of theirs to tensors of ours, and back.

Names may contain `{layer}`, which a family's table fills in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of one tensor of theirs are those of one or several tensors of ours, one after another.

    Attributes:
        theirs: Their name.
        ours: Our names, in the order of the rows. Those that our model lacks are left out; if it lacks them all, so
            must theirs.
        per: The attribute of the mixer that counts groups of rows, such as `num_key_heads`: each group then holds its
            share of every tensor of ours, in order. None for one group.
        of: The mixer of ours in whose layers the rule counts, by class name; None for any.
        aliases: Other names of theirs for it, which are read as well.
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
    """One tensor of theirs that each of several layers of ours holds.

    Attributes:
        theirs: Their name.
        ours: Our name, with `{layer}`; all layers that have it hold the same values.
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class Tied:
    """A tensor of theirs that may be stored though it is another one: where it is, it must be equal.

    Attributes:
        theirs: Their name.
        equals: The name of theirs that it equals.
        unless: Our name that shows that the model does not tie them.
    """

    theirs: str
    equals: str
    unless: str


@dataclass(frozen=True)
class Recut:
    """The rows of several tensors of theirs, one after another, may be cut elsewhere, or be those of one tensor.

    Attributes:
        theirs: Their names, in the order of the rows; other rules say what they are.
        whole: The name of the one tensor.
    """

    theirs: tuple[str, ...]
    whole: str


Rule = Rows | Shared | Tied | Recut


def same(theirs: str, ours: str, *aliases: str) -> Rows:
    """A tensor that has another name in their checkpoints, or several names, see `Rows`."""
    return Rows(theirs, (ours,), aliases=aliases)


def rows(theirs: str, *ours: str, per: str | None = None, of: str | None = None) -> Rows:
    """One tensor of theirs that holds several of ours; see `Rows`."""
    return Rows(theirs, ours, per, of)
