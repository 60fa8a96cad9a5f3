"""Features as a composition of PyTorch ops."""

from torch import Tensor

from .arguments import FeatureStream
from .convolution import continued, convolve
from .stages import ACTIVATIONS, NORMS


def forward(stream: FeatureStream) -> tuple[Tensor, Tensor | None]:
    x = stream.x
    if stream.weight is not None:
        x = convolve(stream).unflatten(-1, x.shape[2:])
    y = NORMS[stream.norm](ACTIVATIONS[stream.activation](x))
    # autocast runs norms in fp32
    return y.to(stream.x.dtype), continued(stream) if stream.return_history else None
