"""Features as a composition of PyTorch ops."""

from torch import Tensor

from .arguments import Stream
from .convolution import continued, convolve
from .stages import ACTIVATIONS, NORMS


def forward(stream: Stream) -> tuple[Tensor, Tensor | None]:
    """y [B,T,heads,size], and the continued history if it is wanted."""
    x = stream.x
    if stream.weight is not None:
        x = convolve(stream).unflatten(-1, x.shape[2:])
    y = NORMS[stream.norm](ACTIVATIONS[stream.activation](x))
    # autocast takes norms to fp32
    return y.to(stream.x.dtype), continued(stream) if stream.return_history else None
