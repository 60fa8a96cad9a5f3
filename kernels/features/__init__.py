"""Short causal depthwise convolution → activation → norm, for every head of a stream."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ..core.backend import Op, loaded
from ..delta_gates import OP as GATES
from ..delta_gates import GateInputs
from . import composition
from .arguments import FeatureStream
from .stages import ACTIVATIONS, NORMS

__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "FeatureStream",
    "features",
    "features_and_gates",
    "features_of_columns",
    "features_together",
]


LARGEST, MOST_TAPS = 1024, 8  # heads and their last inputs have to fit in the registers of eight warps, or 16 in fp32


def _limits(stream: FeatureStream) -> str | None:
    if stream.taps <= MOST_TAPS and (stream.norm == "none" or stream.size <= LARGEST):
        return None
    return f"which takes at most {MOST_TAPS} taps, and norms of heads of at most {LARGEST} channels"


OP = Op(
    "features",
    reference=composition.reference,
    torch=composition.forward,
    gpu="kernels.features.gpu.op:forward",
    limits=_limits,
)


def features(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: Literal["identity", "silu", "relu", "elu1"] = "identity",
    norm: Literal["none", "l2", "l1"] = "none",
    history: Tensor | None = None,
    return_history: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """norm(activation(bias + Σ_j weight_j · x_{t−W+1+j})): the convolution per channel, the norm per head.

    l2 is z / √(Σ z² + 1e-6) and l1 is z / (Σ |z| + 1e-6).

    Args:
        x: Inputs [B,T,heads,size].
        weight: Taps [heads·size,1,W]; the last one applies to the current token. None for no convolution (W = 1).
        bias: Bias [heads·size], or None.
        activation: identity, silu, relu or elu1 (1 + ELU).
        norm: none, l2 or l1.
        history: The W − 1 inputs before x [B,W−1,heads·size], or [N,…] with `cu_seqlens`; zeros by default.
        return_history: Whether to return the last W − 1 inputs.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.

    Returns:
        y [B,T,heads,size] in the dtype of x, and the history for the next call, in the dtype of `history` (else of x),
        or None.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    return features_together([FeatureStream(x, weight, bias, activation, norm, history, return_history, cu_seqlens)])[0]


def features_together(streams: Sequence[FeatureStream]) -> list[tuple[Tensor, Tensor | None]]:
    """Compute `features` of several streams, in one launch where possible.

    For one token of each, without gradients, Triton launches one kernel for all.

    Args:
        streams: The arguments of each call.

    Returns:
        y [B,T,heads,size] and the history of each stream, or None in its place.
    """
    outputs, _, _ = features_of_columns(streams)
    return outputs


def features_and_gates(
    streams: Sequence[FeatureStream], gates: GateInputs
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor, Tensor]]:
    """Compute `features_together` and `delta_gates`, in one launch where `features_together` takes one.

    Args:
        streams: The arguments of each call of `features`.
        gates: The arguments of `delta_gates`.

    Returns:
        y [B,T,heads,size] and the history of each stream, and log_decay and β.
    """
    outputs, both, _ = features_of_columns(streams, gates)
    assert both is not None
    return outputs, both


def features_of_columns(
    streams: Sequence[FeatureStream], gates: GateInputs | None = None, others: Sequence[Tensor] = ()
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor, Tensor] | None, list[Tensor]]:
    """Compute `features_together`, and `delta_gates` if there are any, of columns of one projection.

    If the inputs and `others` are all columns that `split_columns` made of a tensor, kernels on a GPU write the
    gradients into one tensor, so that the backward pass does not concatenate them.

    Args:
        streams: The arguments of each call of `features`.
        gates: The arguments of `delta_gates`; None for none.
        others: Further columns [B,T,…]. The returned tensors are to be used in their place.

    Returns:
        y [B,T,heads,size] and the history of each stream; log_decay and β, or None without `gates`; and the others.
    """
    waiting = [i for i, stream in enumerate(streams) if stream.before != "identity"]
    if waiting and any(stream.differentiated for stream in streams):
        # what the activations read are columns of the projection, what the products read are not
        outputs, both, rest = features_of_columns([stream.in_front() for stream in streams], gates, others)
        behind = features_together([streams[i].behind(outputs[i][0]) for i in waiting])
        for i, output in zip(waiting, behind, strict=True):
            outputs[i] = output
        return outputs, both, rest
    if waiting:
        streams = list(streams)
        for i, (x, _) in zip(waiting, features_together([streams[i].in_front() for i in waiting]), strict=True):
            streams[i] = streams[i].behind(x)
    backends = [OP.backend(stream.x, stream) for stream in streams]
    if all(backend == "triton" for backend in backends):
        outputs, both, rest = loaded("kernels.features.gpu.select:run")(streams, gates, others)
    else:
        multiplied = [stream.multiplied() for stream in streams]
        outputs, both, rest = [OP.choose(stream.x, stream)(stream) for stream in multiplied], None, list(others)
    if gates is not None and both is None:
        log_decay, beta = GATES(gates.a, gates)
        both = log_decay, beta
    return outputs, both, rest
