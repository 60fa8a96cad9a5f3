"""State expansion (Liu et al., "Scaling up the State Size of RNN LLMs", section 4): the only file that knows of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kernels

from .base import LinearMixer, Site
from .features import ACTIVATIONS, Activation


class Expansion(nn.Module):
    """Makes queries or keys `factor` times longer: [B,T,heads,size] → [B,T,heads,factor·size].

    Args:
        heads: Number of key heads.
        size: Size of a key head.
        factor: E.
    """

    def __init__(self, heads: int, size: int, factor: int):
        super().__init__()
        self.heads, self.size, self.factor = heads, size, factor

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class HeadWise(Expansion):
    """SiLU(x_i) W_i with W_i [K, E·K] for each head i (equation 8, with the activation of section 4.3).

    Args:
        heads: Number of key heads.
        size: Size of a key head K.
        factor: E.
        activation: Applied before the expansion: silu, relu, elu1 or identity.
    """

    def __init__(self, heads: int, size: int, factor: int, *, activation: Activation = "silu"):
        super().__init__(heads, size, factor)
        self.activation, self.weight = activation, nn.Parameter(torch.empty(heads, size, factor * size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bthk,hkn->bthn", ACTIVATIONS[self.activation](x), self.weight).contiguous()


@dataclass(frozen=True)
class Expand:
    """What an expanded site asks of the mixer that stands there."""

    factor: int
    subheads: int
    build_expansion: Callable[[int, int, int], Expansion]

    def build(self, heads: int, size: int) -> Expansion:
        """The expansion of queries or keys with `heads` heads of `size`."""
        return self.build_expansion(heads, size, self.factor)


class Expanded(LinearMixer):
    """Any LinearMixer with a recurrent state `factor` times larger (Liu et al., section 4).

    A factory that reads as a class: it builds the inner mixer at a site that carries the request, and there is no
    wrapper at run time. `factor: 1` is the inner mixer itself.

    Args:
        site: Where the layer stands.
        mixer: The mixer to expand.
        factor: E, how many times larger the state gets.
        subheads: Whether an expanded head is cut into E subheads of the original key size, with values shared, gates
            widened and outputs summed (equations 9 and 10); else one head with key size E·K.
        expansion: How queries and keys are expanded.
    """

    def __new__(  # type: ignore[misc]
        cls,
        site: Site,
        *,
        mixer: Callable[[Site], LinearMixer],
        factor: int = 1,
        subheads: bool = True,
        expansion: Callable[[int, int, int], Expansion] = HeadWise,
    ) -> LinearMixer:
        if factor < 1:
            raise kernels.UserError(f"factor: {factor} must be at least 1 (no expansion)")
        if site.expand is not None:
            raise kernels.UserError("mixer: an Expanded inside an Expanded; multiply the factors instead")
        if factor > 1:
            site = site._replace(expand=Expand(factor, factor if subheads else 1, expansion))
        built = mixer(site)
        if not isinstance(built, LinearMixer):
            raise kernels.UserError(
                f"mixer: {type(built).__name__} has no matrix state to expand; Expanded takes a LinearMixer"
            )
        return built
