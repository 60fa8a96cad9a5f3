"""Names of the kinds of decays, by which kernels are compiled."""

from torch import Tensor

KINDS = {1: "constant", 3: "head", 4: "channel"}  # by the number of axes


def kind_of(log_decay: Tensor | None) -> str:
    """The name of the kind of a log decay."""
    return "none" if log_decay is None else KINDS[log_decay.dim()]
