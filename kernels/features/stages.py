"""The activations and norms of `features`, in PyTorch."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..core.elementwise import elu, rsqrt, silu

EPS = 1e-6

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": silu,
    "relu": F.relu,
    "elu1": lambda x: 1 + elu(x),
}
# l2 adds EPS inside the root, as the published models do
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "l2": lambda x: x * rsqrt(x.square().sum(-1, keepdim=True) + EPS),
    "l1": lambda x: x / (x.abs().sum(-1, keepdim=True) + EPS),
}
