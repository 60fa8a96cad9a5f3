"""Both gates of the gated delta rule: the log decay as `discretise` has it, and β = largest · σ(b + bias)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid
from ..core.recurrence import at_least_fp32
from ..discretise import composed as decay
from ..discretise import reference as exact_decay


def strength(b: Tensor, bias: Tensor | None = None, largest: float = 1.0) -> Tensor:
    """β = largest · σ(b + bias) […,M], in at least fp32."""
    b = at_least_fp32(b)
    beta = sigmoid(b if bias is None else b + at_least_fp32(bias))
    return beta if largest == 1 else largest * beta


@dataclass  # not frozen: that takes five times as long to construct
class GateInputs:
    """The arguments of one call of `delta_gates`, where they are explained, for `features_and_gates`.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """

    a: Tensor  # […,M]
    A_log: Tensor  # [M]
    dt_bias: Tensor  # [M]
    b: Tensor  # […,M]
    bias: Tensor | None = None  # [M]
    largest: float = 1.0

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        for name, x in (("A_log", self.A_log), ("dt_bias", self.dt_bias), ("bias", self.bias)):
            if x is not None and x.shape != a.shape[-1:]:
                raise ValueError(f"{name}: expected [{a.shape[-1]}], got shape {tuple(x.shape)}")
        if b.shape != a.shape:
            raise ValueError(f"b: expected the shape of a {tuple(a.shape)}, got {tuple(b.shape)}")

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.a, self.A_log, self.dt_bias, self.b, self.bias

    @property
    def differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in self.tensors)


def composed(gates: GateInputs) -> tuple[Tensor, Tensor]:
    """The formulas in PyTorch."""
    return decay(gates.a, gates.A_log, gates.dt_bias)[0], strength(gates.b, gates.bias, gates.largest)


def reference(gates: GateInputs) -> tuple[Tensor, Tensor]:
    """The formulas, with softplus by its definition and σ(x) = (1 + tanh(x/2)) / 2."""
    b, bias = gates.b, gates.bias
    x = at_least_fp32(b) if bias is None else at_least_fp32(b) + at_least_fp32(bias)
    return exact_decay(gates.a, gates.A_log, gates.dt_bias)[0], gates.largest * (1 + torch.tanh(x / 2)) / 2


OP = Op("delta_gates", reference=reference, torch=composed, gpu="kernels.delta_gates.gpu.op:forward")


def delta_gates(
    a: Tensor, A_log: Tensor, dt_bias: Tensor, b: Tensor, bias: Tensor | None = None, *, largest: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log_decay = −exp(A_log) · softplus(a + dt_bias) and β = largest · σ(b + bias) (arXiv 2412.06464), in one launch.

    Args:
        a: Inputs of the decays […,M], one for each of M recurrences.
        A_log: Log of the decay rates [M].
        dt_bias: Bias of these inputs [M].
        b: Inputs of β, in the shape of a.
        bias: Bias of these inputs [M]; None for none.
        largest: What β stays below.

    Returns:
        log_decay and β, both in the shape of a and at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    log_decay, beta = OP(a, GateInputs(a, A_log, dt_bias, b, bias, largest))
    return log_decay, beta
