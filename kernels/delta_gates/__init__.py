"""Gates of the delta rule: the log decay as in `discretise`, per head or channel, and β = largest · σ(b + bias)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid
from ..core.recurrence import at_least_fp32
from ..discretise import composed as decay
from ..discretise import reference as exact_decay
from ..linear import linear


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

    a: Tensor  # […,M], or per channel […,M,K]; with `up` […,R]
    A_log: Tensor  # [M]
    dt_bias: Tensor  # [M], or per channel [M,K]
    b: Tensor | None  # […,M]; None if only the decays are needed
    bias: Tensor | None = None  # [M]
    largest: float = 1.0
    up: Tensor | None = None  # [M·K,R]: a is multiplied by it first
    lower_bound: float | None = None  # of the log decays, which then are bounded

    def __post_init__(self) -> None:
        if self.up is not None and list(self.up.shape) != (sizes := [self.dt_bias.numel(), self.a.shape[-1]]):
            raise ValueError(f"up: expected {sizes}, got shape {tuple(self.up.shape)}")
        shape, axes = self.shape, self.dt_bias.dim()
        heads = [shape[-axes]]
        for name, x, wanted in (("A_log", self.A_log, heads), ("dt_bias", self.dt_bias, list(shape[-axes:]))):
            if list(x.shape) != wanted:
                raise ValueError(f"{name}: expected {wanted}, got shape {tuple(x.shape)}")
        if self.bias is not None and list(self.bias.shape) != heads:
            raise ValueError(f"bias: expected {heads}, got shape {tuple(self.bias.shape)}")
        if self.b is not None and self.b.shape != (steps := shape[: len(shape) - axes + 1]):
            said = "the shape of a" if self.up is None and axes == 1 else "shape"
            raise ValueError(f"b: expected {said} {tuple(steps)}, got {tuple(self.b.shape)}")

    @property
    def shape(self) -> torch.Size:
        """The shape of the decays."""
        return self.a.shape if self.up is None else self.a.shape[:-1] + self.dt_bias.shape

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.a, self.A_log, self.dt_bias, self.b, self.bias, self.up

    @property
    def lower(self) -> float:
        """The lower bound of the log decays; 0 for none."""
        return 0.0 if self.lower_bound is None else self.lower_bound

    def multiplied(self) -> "GateInputs":
        """Return the inputs after the product with `up`."""
        if self.up is None:
            return self
        a = linear(self.a, self.up).view(self.shape)
        return GateInputs(a, *self.tensors[1:-1], self.largest, lower_bound=self.lower_bound)

    @property
    def differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in self.tensors)


def rates(gates: GateInputs) -> Tensor:
    """A_log in a shape that broadcasts against the decays."""
    return gates.A_log if gates.dt_bias.dim() == 1 else gates.A_log[:, None]


def before_sigmoid(gates: GateInputs) -> Tensor:
    """exp(A_log) · (a + dt_bias), whose sigmoid makes a bounded decay."""
    return at_least_fp32(rates(gates)).exp() * (at_least_fp32(gates.a) + at_least_fp32(gates.dt_bias))


def composed(gates: GateInputs) -> tuple[Tensor, Tensor | None]:
    """The formulas in PyTorch."""
    gates = gates.multiplied()
    beta = None if gates.b is None else strength(gates.b, gates.bias, gates.largest)
    if gates.lower_bound is None:
        return decay(gates.a, rates(gates), gates.dt_bias)[0], beta
    return gates.lower_bound * sigmoid(before_sigmoid(gates)), beta


def reference(gates: GateInputs) -> tuple[Tensor, Tensor | None]:
    """The formulas, with softplus by its definition and σ(x) = (1 + tanh(x/2)) / 2."""
    gates = gates.multiplied()
    if gates.lower_bound is None:
        log_decay = exact_decay(gates.a, rates(gates), gates.dt_bias)[0]
    else:
        log_decay = gates.lower_bound * (1 + torch.tanh(before_sigmoid(gates) / 2)) / 2
    if gates.b is None:
        return log_decay, None
    x = at_least_fp32(gates.b) if gates.bias is None else at_least_fp32(gates.b) + at_least_fp32(gates.bias)
    return log_decay, gates.largest * (1 + torch.tanh(x / 2)) / 2


OP = Op("delta_gates", reference=reference, torch=composed, gpu="kernels.delta_gates.gpu.op:forward")


def delta_gates(
    a: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    largest: float = 1.0,
    up: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log_decay = −exp(A_log) · softplus(a + dt_bias) and β = largest · σ(b + bias) (arXiv 2412.06464), in one launch.

    Args:
        a: Inputs of the decays […,M], one for each of M recurrences; for decays per channel […,M,K]. With `up` […,R].
        A_log: Log of the decay rates [M].
        dt_bias: Bias of the inputs of the decays [M]; for decays per channel [M,K] (KDA, arXiv 2510.26692).
        b: Inputs of β […,M].
        bias: Bias of these inputs [M]; None for none.
        largest: What β stays below.
        up: Weight [M,R] or [M·K,R] that makes the inputs of the decays from R numbers; None if a has them.
        lower_bound: For bounded decays, log_decay = lower_bound · σ(exp(A_log) · (a + dt_bias)); None for the others.

    Returns:
        log_decay […,M] or […,M,K] and β […,M], both at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    log_decay, beta = OP(a, GateInputs(a, A_log, dt_bias, b, bias, largest, up, lower_bound))
    return log_decay, beta


def channel_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """log_decay of `delta_gates` per channel […,M,K], of a […,M,K], A_log [M] and dt_bias [M,K]."""
    log_decay: Tensor = OP(a, GateInputs(a, A_log, dt_bias, None, lower_bound=lower_bound))[0]
    return log_decay
