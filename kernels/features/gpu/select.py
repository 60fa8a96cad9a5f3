"""The kernel paths of `features`: what runs for a stream, and for several together."""

from collections.abc import Sequence

from torch import Tensor

from ...delta_gates import GateInputs
from ...gpu.paths import KernelPath, always, select
from ..arguments import FeatureStream
from . import expanded, joint, op, token

PATHS = (
    KernelPath(
        "with_product",
        when=expanded.fits,
        why="an expanded stream in bf16 on Hopper, heads of 128 channels, 4 taps, from 64 tokens on, no state: the "
        "product by each head's matrix, convolution, activation and norm need one launch",
    ),
    KernelPath(
        "one_stream",
        when=always,
        why="any other stream, after its product: convolution, activation and norm in one launch",
    ),
)


def run(
    streams: Sequence[FeatureStream], gates: GateInputs | None, others: Sequence[Tensor]
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor, Tensor] | None, list[Tensor]]:
    """y and the history of each stream, both gates if they were computed, and the other columns.

    One token of several streams and the gates take a single launch (`token.py`).
    """
    fused = [select(PATHS, stream).name == "with_product" for stream in streams]
    inputs = [stream if one else stream.multiplied() for one, stream in zip(fused, streams, strict=True)]
    if not any(fused):
        if token.fits(inputs, gates):
            return *token.forward(inputs, gates), list(others)
        if (len(inputs) > 1 or others) and joint.fits(inputs, gates):
            return joint.forward(inputs, gates, others)
    forwards = [expanded.forward if one else op.forward for one in fused]
    return [forward(stream) for forward, stream in zip(forwards, inputs, strict=True)], None, list(others)
