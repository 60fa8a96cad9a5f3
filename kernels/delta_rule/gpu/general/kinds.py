"""Kinds of decays and of erase keys, for which kernels are compiled."""

from torch import Tensor

from ....core.recurrence import Recurrences

KINDS = {1: "constant", 3: "head", 4: "channel"}  # by the number of axes


def kind_of(log_decay: Tensor | None) -> str:
    """The name of the kind of a log decay."""
    return "none" if log_decay is None else KINDS[log_decay.dim()]


def erasing(a: Recurrences) -> tuple[Tensor | None, Tensor | None, bool]:
    """β per head, the erase keys or factors on k, and whether they are factors."""
    if a.beta is not None and a.beta.dim() == 4:
        return None, a.beta, True
    return a.beta, a.erase, False
