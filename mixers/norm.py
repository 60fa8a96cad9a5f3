"""Norms as modules, and the modules between recurrence and output projection."""

from typing import ClassVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid, silu
from kernels.core.recompute import remake
from kernels.norm import add_layer_norm, layer_norm

from .arguments import check_numbers, check_sizes
from .fusion import Fusable
from .precision import KeepsFp32


def _check(size: int, eps: float) -> None:
    check_sizes({"size": size})
    check_numbers({"eps": eps}, positive=False)


class Norm(KeepsFp32):
    """A norm over the last axis. Subclass it to write another one, for the residual stream or a mixer's output."""

    eps: float

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [...,size] → its norm; x and y → x + y and its norm: the residual stream, and the input of a layer."""
        return self.normed(x) if y is None else self.added(x, y)

    def normed(self, x: Tensor) -> Tensor:
        """The norm of x."""
        raise NotImplementedError

    def added(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        total = x + y
        return total, self.normed(total)

    def qk_norm(self) -> kernels.QKNorm | None:
        """Return the norm as an argument of a kernel; None if it cannot be."""
        return None


class SimpleRMSNorm(Norm, Fusable):
    """x / √(mean x² + eps) over the last axis, without a weight (arXiv 2307.14995).

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    token_methods = ("forward", "normed", "scale")

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        _check(size, eps)
        self.size, self.eps = size, eps

    @property
    def scale(self) -> Tensor | None:
        """Factor of each channel [size]; None for 1."""
        return None

    def qk_norm(self) -> kernels.QKNorm | None:
        return kernels.QKNorm(self.size, None, self.eps) if self.fused_token else None

    def normed(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.scale, self.eps)

    def added(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, y, self.scale, self.eps)


class RMSNorm(SimpleRMSNorm):
    """x / √(mean x² + eps) · weight over the last axis.

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    keep_fp32 = ("weight",)
    fused_token = True
    offset: ClassVar[float] = 0.0  # added to the weight

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    @property
    def scale(self) -> Tensor:
        return self.offset + self.weight if self.offset else self.weight

    def qk_norm(self) -> kernels.QKNorm | None:
        return kernels.QKNorm(len(self.weight), self.weight, self.eps, self.offset) if self.fused_token else None


class ZeroCentredRMSNorm(RMSNorm):
    """x / √(mean x² + eps) · (1 + weight) over the last axis; the weight starts at 0.

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    offset = 1.0

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def qk_norms(q: nn.Module | None, k: nn.Module | None) -> tuple[kernels.QKNorm | None, kernels.QKNorm | None]:
    """Return two norms as arguments of a kernel; None for both if one of them cannot be, or there is none."""
    q_norm, k_norm = (norm.qk_norm() if isinstance(norm, Norm) else None for norm in (q, k))
    return (None, None) if q_norm is None or k_norm is None else (q_norm, k_norm)


class LayerNorm(Norm):
    """(x − mean x) / √(var x + eps) · weight + bias over the last axis, computed in at least fp32 (arXiv 1607.06450).

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    keep_fp32 = ("weight", "bias")

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        _check(size, eps)
        self.eps, self.weight, self.bias = eps, nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def normed(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def added(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, y, self.weight, self.bias, self.eps)


class HeadNorm(KeepsFp32):
    """Parameters of a LayerNorm of each head, with a weight and a bias for each channel of each head: a GroupNorm.

    `kernels.bonus_readout` computes it.

    Args:
        heads: Number of heads.
        size: Size of a head.
        eps: Added inside the root.
        start: Initial weight.
    """

    keep_fp32 = no_weight_decay = ("weight", "bias")

    def __init__(self, heads: int, size: int, eps: float = 1e-5, start: float = 1.0):
        super().__init__()
        check_sizes({"heads": heads})
        _check(size, eps)
        self.eps, self.start = eps, start
        self.weight, self.bias = (nn.Parameter(torch.empty(heads, size)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)
        nn.init.zeros_(self.bias)


class HeadLayerNorm(KeepsFp32, Fusable):
    """LayerNorm(o) · weight · σ(gate), each head normalised separately, with a weight for each channel of each head.

    Args:
        heads: Number of heads.
        size: Size of a head.
        eps: Added inside the root.
    """

    keep_fp32 = ("weight",)

    def __init__(self, heads: int, size: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.empty(heads * size))  # a vector, as Muon takes matrices
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        normed = F.layer_norm(kernels.at_least_fp32(o), o.shape[-1:], eps=self.eps) * self.weight.view(o.shape[-2:])
        return (normed * sigmoid(kernels.at_least_fp32(gate))).to(gate.dtype)


class Output(KeepsFp32):
    """Layer between the recurrence and the output projection: o [...,size], gate [...,size] → [...,size].

    Subclass it to write another one; `gated` says whether the mixer has to project a gate.
    """

    gated: ClassVar[bool] = True

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        raise NotImplementedError

    def gated_norm(self, gate: Tensor | None) -> kernels.GatedNorm | None:
        """Return the arguments of `kernels.gated_rms_norm`, if that is what `forward` computes of o."""
        return None


class GatedRMSNorm(Output, Fusable):
    """RMSNorm(o) · SiLU(gate), or, with `gate_first`, RMSNorm(o · SiLU(gate)).

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
        gate_first: Whether to apply the gate before the norm (Mamba2).
        groups: How many parts of the last axis are normalised separately.
    """

    keep_fp32 = ("weight",)

    def __init__(self, size: int, eps: float = 1e-5, *, gate_first: bool = False, groups: int = 1):
        super().__init__()
        _check(size, eps)
        check_sizes({"groups": groups})
        if size % groups:
            raise kernels.UserError(f"groups: {groups} do not divide size {size}")
        self.eps, self.weight = eps, nn.Parameter(torch.empty(size))
        self.gate_first, self.groups = gate_first, groups
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        if self.groups == 1:
            return kernels.gated_rms_norm(o, gate, self.weight, self.eps, gate_first=self.gate_first)
        o, gate = o.unflatten(-1, (self.groups, -1)), gate.unflatten(-1, (self.groups, -1))
        y = kernels.gated_rms_norm(o, gate, None, self.eps, gate_first=self.gate_first)
        return (y.flatten(-2) * self.weight).to(o.dtype)

    def gated_norm(self, gate: Tensor | None) -> kernels.GatedNorm | None:
        if gate is None or self.groups > 1 or not self.fused:
            return None
        return kernels.GatedNorm(gate, self.weight, self.eps, self.gate_first)


class SigmoidGatedRMSNorm(Output, Fusable):
    """RMSNorm(o) · σ(gate) (KDA, arXiv 2510.26692).

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.norm = RMSNorm(size, eps)

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return kernels.gated_rms_norm(o, gate, self.norm.scale, self.norm.eps, activation="sigmoid")

    def gated_norm(self, gate: Tensor | None) -> kernels.GatedNorm | None:
        if gate is None or not self.fused:
            return None
        return kernels.GatedNorm(gate, self.norm.scale, self.norm.eps, activation="sigmoid")


class NormOnly(Output, Fusable):
    """RMSNorm(o) without a gate.

    Args:
        size: Size of the last axis.
        eps: Added inside the root.
    """

    gated = False

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.norm = RMSNorm(size, eps)

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        return self.norm(o)

    def gated_norm(self, gate: Tensor | None) -> kernels.GatedNorm | None:
        return kernels.GatedNorm(None, self.norm.scale, self.norm.eps) if self.fused else None


class GateOnly(Output, Fusable):
    """o · SiLU(gate) without a norm. Inside `recomputing()` the result is not saved by what follows.

    Args:
        size: Size of the last axis.
    """

    def __init__(self, size: int):
        super().__init__()
        check_sizes({"size": size})

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        factor = remake(silu(gate), silu, gate)
        return remake(o * factor, torch.mul, o, factor)
