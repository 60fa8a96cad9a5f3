"""Growth of the state of a trained mixer: the arguments that change, and the new weights.

A mixer's file has the `Growth` that only this mixer needs. Nothing above the mixers knows more of one than what is
declared there. (StateX, and Liu et al. for subheads.)
"""

from typing import ClassVar, Literal, get_args

from torch import Tensor

import kernels

from .base import LinearMixer, TokenMixer
from .expanded import Expanded

Init = Literal["reinit", "inherit", "preserve"]
INITS: tuple[Init, ...] = get_args(Init)


class Growth:
    """One way in which the state of one kind of mixer grows. Subclass it for a mixer of your own.

    Attributes:
        grows: The class of mixers that grow in this way; its subclasses do, too.
        way: What users call it.
        around: A class of factories around the mixer that takes the new arguments; None if the mixer takes them itself.
        renewed: Names of the parameters that `reinit` draws anew, or beginnings of names; the others are inherited.
        renews_norm: Whether `reinit` also resets the norm in front of the mixer.

    Args:
        mixer: The mixer before; it may be on the meta device.
    """

    grows: ClassVar[type[LinearMixer]]
    way: ClassVar[str]
    around: ClassVar[type | None] = None
    renewed: ClassVar[tuple[str, ...]] = ("",)
    renews_norm: ClassVar[bool] = True

    def __init__(self, mixer: LinearMixer):
        self.mixer = mixer

    def default_factor(self) -> int:
        """Factor by which the state grows unless the user sets one."""
        return 4

    def arguments(self, factor: int, init: Init) -> dict[str, object]:
        """The constructor's arguments that make the state `factor` times larger.

        Raises:
            UserError: The mixer cannot grow by this factor, or not with this `init`.
        """
        raise NotImplementedError

    def resized(self, name: str, old: Tensor, fresh: Tensor, init: Init) -> Tensor:
        """The trained tensor at its new size.

        Args:
            name: The name of a parameter whose shape changes.
            old: The trained tensor.
            fresh: The same parameter of the larger mixer, initialised.
            init: `inherit` or `preserve`; or `reinit`, if the parameter is not `renewed`.
        """
        raise NotImplementedError


class MergedHeads(Growth):
    """`factor` neighbouring heads become one (StateX, section 4.1): as many channels, in a larger matrix.

    What is per head is repeated for the channels of all heads (norms), or averaged over them (gates).
    """

    way = "merge"

    def default_factor(self) -> int:
        return self.mixer.num_key_heads

    def arguments(self, factor: int, init: Init) -> dict[str, object]:
        name, heads = type(self.mixer).__name__, self.mixer.num_key_heads
        if heads == 1:
            raise kernels.UserError(f"way: {name} has one head, so there is nothing to merge; choose way=expand")
        if heads % factor:
            raise kernels.UserError(f"factor: {factor} does not divide the {heads} heads of {name} that are merged")
        if init == "preserve":
            raise kernels.UserError(
                f"init: preserve is impossible where heads of {name} are merged, as the scores of all heads add up in "
                "one head; choose reinit or inherit, or way=expand"
            )
        return self.merged(factor)

    def merged(self, factor: int) -> dict[str, object]:
        """The constructor's arguments for `factor` times fewer heads of as many channels together."""
        raise NotImplementedError

    def resized(self, name: str, old: Tensor, fresh: Tensor, init: Init) -> Tensor:
        if len(fresh) > len(old):
            return old.repeat(len(fresh) // len(old), *[1] * (old.dim() - 1))
        return old.unflatten(0, (len(fresh), -1)).mean(1)


class MergedSizes(MergedHeads):
    """Mixers whose heads have sizes as arguments: one β and one decay in place of those of `factor` heads."""

    def merged(self, factor: int) -> dict[str, object]:
        return {
            "num_heads": self.mixer.num_heads // factor,
            "num_key_heads": self.mixer.num_key_heads // factor,
            "head_dim": self.mixer.key_size * factor,
            "value_dim": self.mixer.value_size * factor,
        }


class MergedLowRank(MergedSizes):
    """`MergedSizes` with decays per channel, which do not change, and neither does the rank of their projection."""

    def merged(self, factor: int) -> dict[str, object]:
        ranks = [part.in_features for name, part in self.mixer.named_children() if name in ("decay_up", "g_up")]
        return {**super().merged(factor), **({"rank": ranks[0]} if ranks else {})}


class Subheads(Growth):
    """Any matrix state: each head becomes `factor` subheads, which start with its gates and convolutions.

    With `preserve`, subhead 0 is the head as it was, and the outputs of the others start at zero.
    """

    grows, way, around = LinearMixer, "expand", Expanded

    def arguments(self, factor: int, init: Init) -> dict[str, object]:
        return {"factor": factor, "subheads": True, "residual": init == "preserve"}

    def resized(self, name: str, old: Tensor, fresh: Tensor, init: Init) -> Tensor:
        (axis,) = (axis for axis in range(old.dim()) if old.shape[axis] != fresh.shape[axis])
        of_heads = old.unflatten(axis, (self.mixer.heads_of(name), 1, -1))
        repeats = [1] * of_heads.dim()
        repeats[axis + 1] = fresh.shape[axis] // old.shape[axis]
        return of_heads.repeat(repeats).flatten(axis, axis + 2)


def growths(mixer: TokenMixer) -> list[Growth]:
    """Return the ways in which a mixer's state can grow, the most specific first; none if not a matrix or expanded."""
    if not isinstance(mixer, LinearMixer) or mixer.site.expand is not None:
        return []
    rules = [rule for rule in _below(Growth) if isinstance(mixer, getattr(rule, "grows", ()))]
    return [rule(mixer) for rule in sorted(rules, key=lambda rule: type(mixer).__mro__.index(rule.grows))]


def _below(rule: type[Growth]) -> list[type[Growth]]:
    return [subclass for direct in rule.__subclasses__() for subclass in (direct, *_below(direct))]
