"""One token of a Gated DeltaNet or KDA layer, from its projections to the input of its output projection."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.autograd import plain
from ..core.backend import loaded
from ..core.deterministic import is_deterministic
from ..core.recurrence import check_scale
from ..delta_gates import GateInputs
from ..features import MOST_TAPS, FeatureStream, features_and_gates
from ..norm import ACTIVATIONS, GatedNorm, gated_rms_norm
from . import OP as DELTA_RULE  # the OP of a module is that of its function
from . import delta_rule

LARGEST = 128 * 256  # elements of a head's state, with both sizes rounded up to powers of two


def padded(size: int) -> int:
    """The smallest power of two that is not less than a size."""
    return 1 << (size - 1).bit_length()


def in_one_launch(streams: Sequence[FeatureStream], gates: GateInputs, norm: GatedNorm, state: Tensor) -> bool:
    """Return whether one kernel computes a token: neither gradients nor casts, and as many key heads as value heads.

    Deterministic mode uses the kernels of longer sequences.
    """
    q, _, v = streams
    tensors = (*gates.tensors, norm.gate, norm.weight, state, *(x for s in streams for x in (s.x, s.weight, s.history)))
    kinds = {x.dtype for x in (gates.a, gates.b, norm.gate, *(stream.x for stream in streams)) if x is not None}
    return (
        not is_deterministic()
        and plain(tensors)
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))
        and len(kinds) == 1
        and gates.b is not None
        and state.dtype != torch.float64
        and autocast_dtype(q.x.device) is None
        and q.x.shape[2] == v.x.shape[2]
        and padded(q.size) * padded(v.size) <= LARGEST
        and all(s.product is None and s.weight is not None and s.taps <= MOST_TAPS for s in streams)
    )


def check(
    streams: Sequence[FeatureStream], gates: GateInputs, norm: GatedNorm, state: Tensor, scale: float | None
) -> None:
    """Check the arguments of `delta_rule_token` as far as they do not check themselves.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if len(streams) != 3:
        raise ValueError(f"streams: expected those of q, k and v, got {len(streams)}")
    q, k, v = streams
    B, T = v.x.shape[:2]
    (heads, K), (H, V) = (q.x.shape[2], q.size), (v.x.shape[2], v.size)
    if T != 1 or any(stream.cu_seqlens is not None for stream in streams):
        raise ValueError(f"streams: expected one token of each sequence, got {T}, or packed documents")
    if not all(stream.return_history for stream in streams):
        raise ValueError("streams: return_history has to be set for all of them")
    if k.x.shape != q.x.shape or q.x.shape[:2] != (B, T) or H % heads:
        shapes = ", ".join(str(tuple(stream.x.shape)) for stream in streams)
        raise ValueError(f"streams: expected q and k [B,1,G,K] and v [B,1,H,V], H a multiple of G, got {shapes}")
    for name, x, wanted in (
        ("gates", gates.b, (B, 1, H)),
        ("gates.dt_bias", gates.dt_bias, (H, K)[: gates.dt_bias.dim()]),
        ("norm.gate", norm.gate, (B, 1, H, V)),
        ("norm.weight", norm.weight, (V,)),
        ("initial_state", state, (B, H, K, V)),
    ):
        if x is not None and tuple(x.shape) != wanted:
            raise ValueError(f"{name}: expected {list(wanted)}, got shape {tuple(x.shape)}")
    if norm.activation not in ACTIVATIONS:
        raise ValueError(f"norm.activation: {norm.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if not state.is_floating_point() or state.device != v.x.device:
        raise ValueError(f"initial_state: expected floats on {v.x.device}, got {state.dtype} on {state.device}")
    if scale is not None:
        check_scale(scale)


def delta_rule_token(
    streams: Sequence[FeatureStream],
    gates: GateInputs,
    norm: GatedNorm,
    initial_state: Tensor,
    *,
    scale: float | None = None,
    consume_state: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Compute `features_and_gates`, `delta_rule` and `gated_rms_norm` for one token, in one launch where possible.

    A GPU reads and writes the state of each head once. Other calls run the three ops one after another.

    Args:
        streams: The arguments of `features` for q [B,1,G,K], k [B,1,G,K] and v [B,1,H,V], with `return_history`.
        gates: The arguments of `delta_gates`, of H recurrences, with a decay per head or per channel.
        norm: The arguments of `gated_rms_norm` besides the output of the recurrence.
        initial_state: S_0 [B,H,K,V].
        scale: Factor on the output of the recurrence; K^-½ by default.
        consume_state: Whether the next state may be written into `initial_state`.

    Returns:
        The normalised output [B,1,H,V], the history of each stream for the next token, and the next state.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    check(streams, gates, norm, initial_state, scale)
    v = streams[2].x
    if in_one_launch(streams, gates, norm, initial_state) and DELTA_RULE.backend(v) == "triton":
        scale = streams[0].size ** -0.5 if scale is None else scale
        run = loaded("kernels.delta_rule.gpu.token:forward")
        y, histories, state = run(streams, gates, norm, initial_state, scale, consume_state)
        return y, histories, state
    return composed(streams, gates, norm, initial_state, scale, consume_state)


def composed(
    streams: Sequence[FeatureStream],
    gates: GateInputs,
    norm: GatedNorm,
    initial_state: Tensor,
    scale: float | None,
    consume_state: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The three ops one after another; the arguments are those of `delta_rule_token`."""
    ((q, *first), (k, *second), (v, *third)), (log_decay, beta) = features_and_gates(streams, gates)
    histories = [history for history in (*first, *second, *third) if history is not None]
    o, state = delta_rule(
        q,
        k,
        v,
        beta,
        log_decay,
        scale=scale,
        initial_state=initial_state,
        return_state=True,
        consume_state=consume_state,
    )
    assert state is not None
    y = gated_rms_norm(o, *norm[:3], gate_first=norm.gate_first, activation=norm.activation)
    return y, histories, state
