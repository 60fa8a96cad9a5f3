"""Short causal depthwise convolution → activation → norm, for every head of a stream."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from ..backend import choose
from ..delta_gates import GateInputs
from ..delta_gates import run as delta_gates
from . import composition, reference
from .arguments import FeatureStream
from .stages import ACTIVATIONS, NORMS

__all__ = ["ACTIVATIONS", "NORMS", "FeatureStream", "features", "features_and_gates", "features_together"]


def triton(stream: FeatureStream) -> tuple[Tensor, Tensor | None]:
    """The Triton implementation, imported on first use: not every platform has Triton."""
    from . import triton_op

    return triton_op.forward(stream)


def with_product(stream: FeatureStream) -> Callable[[FeatureStream], tuple[Tensor, Tensor | None]] | None:
    """The implementation that includes the product of a stream; None if it has none, or that cannot take it."""
    if stream.product is None:
        return None
    from . import expanded_op

    return expanded_op.forward if expanded_op.fits(stream) else None


def one_launch(
    streams: Sequence[FeatureStream], gates: GateInputs | None
) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor | None] | None:
    """One token of several streams, and the gates, in one launch; None if they need more."""
    from . import triton_token

    return triton_token.forward(streams, gates) if triton_token.fits(streams, gates) else None


IMPLEMENTATIONS = {"triton": triton, "torch": composition.forward, "reference": reference.forward}
LARGEST, MOST_TAPS = 1024, 8  # heads and their last inputs have to fit in the registers of eight warps, or 16 in fp32
LIMITS = f"which takes at most {MOST_TAPS} taps, and norms of heads of at most {LARGEST} channels"


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
    outputs, _ = together(streams, None)
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
    outputs, both = together(streams, gates)
    return outputs, delta_gates(gates) if both is None else (both[0], both[1])


def together(
    streams: Sequence[FeatureStream], gates: GateInputs | None
) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor | None]:
    """y and the history of each stream, and both gates [2,…,M] if the same launch made them."""
    chosen, inputs = [], []
    for stream in streams:
        fits = stream.taps <= MOST_TAPS and (stream.norm == "none" or stream.size <= LARGEST)
        implementation = choose("features", IMPLEMENTATIONS, stream.x, None if fits else LIMITS)
        if implementation is triton and (at_once := with_product(stream)) is not None:
            implementation = at_once
        else:
            stream = stream.multiplied()
        chosen.append(implementation)
        inputs.append(stream)
    streams = inputs
    if all(implementation is triton for implementation in chosen) and (done := one_launch(streams, gates)) is not None:
        return done
    return [implementation(stream) for implementation, stream in zip(chosen, streams, strict=True)], None
