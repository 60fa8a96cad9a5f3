"""Root-mean-square normalisation as a composition of PyTorch ops, in at least fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, gate_first: bool, dtype: torch.dtype
) -> Tensor:
    """The shape of x; see `gated_rms_norm`."""
    kind = torch.promote_types(x.dtype, torch.float32)
    given, opened = x.to(kind), None if gate is None else F.silu(gate.to(kind))
    if opened is not None and gate_first:
        given = given * opened
    y = F.rms_norm(given, x.shape[-1:], None if weight is None else weight.to(kind), eps)
    return (y if opened is None or gate_first else y * opened).to(dtype)
