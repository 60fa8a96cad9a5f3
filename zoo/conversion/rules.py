"""Rules that map public tensors (`theirs`) to our tensors (`ours`), and back.

Names may contain `{layer}`, which a family's table fills in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """One public tensor that each of several of our layers holds.

    Attributes:
        theirs: Their name.
        ours: Our name, with `{layer}`; all layers that have it hold the same values.
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class Tied:
    """A public tensor that is tied to another one. It may be stored as well, and must then be equal to that.

    Attributes:
        theirs: Their name.
        equals: The public name of the tensor that it equals.
        unless: Our name that shows that the model does not tie them.
    """

    theirs: str
    equals: str
    unless: str


@dataclass(frozen=True)
class Recut:
    """The rows of several public tensors, one after another, may be divided differently, or be one tensor.

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
    """One public tensor that holds several of our tensors; see `Rows`."""
    return Rows(theirs, ours, per, of)
