"""HGRN2."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

import kernels
from kernels.forget_gate import lower_bound_odds

from .arguments import check_numbers, check_sizes
from .base import LinearMixer, Site, Streams, TokenMixer, checked_site
from .features import Features
from .fusion import Fusable
from .growth import MergedHeads
from .norm import Norm, RMSNorm
from .precision import KeepsFp32
from .projection import OutputProjection, Projection, split_heads
from .registry import register

HEAD_DIM = 128  # as in the paper, for models of all sizes


class LowerBounds(KeepsFp32, Fusable):
    """The least that each channel remembers, which rises with the layer: lb_l = Σ_{1 ≤ i ≤ l} softmax(γ)_i, lb_0 = 0.

    One matrix γ for all layers of a model (arXiv 2404.07904, and the authors' code, which subtracts the first row).

    Args:
        num_layers: Rows of γ.
        size: Channels.
        high: The bound of the top layer at the start, between 0 and 1; those below rise to it evenly. Null for γ = 0,
            which is (L − 1)/L for L layers: in a model of few layers every channel then forgets within a few tokens.
    """

    no_weight_decay = keep_fp32 = ("weight",)
    fused_method = "odds"

    def __init__(self, num_layers: int, size: int, high: float | None = None):
        super().__init__()
        check_sizes({"num_layers": num_layers, "size": size})
        if high is not None and not 0 < high < 1:
            raise kernels.UserError(f"high: {high} must be between 0 and 1, both excluded")
        self.high, self.weight = high, nn.Parameter(torch.empty(num_layers, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.high is not None:  # softmax(γ)_0 = 1 − high, and the other rows share the rest
            self.weight[1:] += math.log(self.high / (1 - self.high) / max(len(self.weight) - 1, 1))

    def odds(self, layer: int) -> Tensor | None:
        """The log odds of lb at a layer [size]; None where lb is 0, whose log odds are not finite."""
        if layer == 0:
            return None
        return lower_bound_odds(self.weight, layer)


def build_lower_bounds(
    factory: Callable[[int, int], LowerBounds] | None, site: Site, channels: int
) -> LowerBounds | None:
    """The lower bounds of the layer at a site; None for the lowest layer, whose bound is 0."""
    return factory(site.num_layers, channels) if factory is not None and site.layer > 0 else None


class Bounded(Protocol):
    """A mixer that may have lower bounds."""

    lower_bounds: LowerBounds | None


def adopt_lower_bounds(mixer: Bounded, below: Sequence[TokenMixer]) -> None:
    """Take over the lower bounds of the first layer below that has any of the same shape."""
    for other in below:
        shared, current = getattr(other, "lower_bounds", None), mixer.lower_bounds
        if shared is not None and current is not None and shared.weight.shape == current.weight.shape:
            mixer.lower_bounds = shared
            return


@register(
    recurrence="S_t = diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ",
    paper="HGRN2, arXiv 2404.07904",
    tiny={"head_dim": 32},
)
class HGRN2(LinearMixer):
    """S_t = diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ with f_t = lb + (1 − lb) σ(W_f x_t) (arXiv 2404.07904).

    The key is tied to the decay, k = 1 − f, so that a channel writes as much as it forgets. The lower bounds lb rise
    with the layer and are shared by all layers of a model. An expansion widens the raw f; decay and key follow per
    subhead.

    (arXiv 2406.16690 prints neither the SiLU on q nor the subtraction of the first bound; taken literally, its top
    layer would be dead.)

    Args:
        site: Where the layer sits in the model.
        head_dim: Size K = V of a head, from which the number of heads follows; by default the paper's 128, or
            hidden_size / num_heads where 128 does not divide hidden_size.
        lower_bounds: The lower bounds of all layers; null for none, f = σ(W_f x).
        q: Features of queries.
        k: Features of f, the raw forget gates from which keys are made; recall needs a short convolution.
        v: Features of i, the values; the same holds for them.
        norm: The output norm, such as RMSNorm or SimpleRMSNorm.
        norm_eps: Added inside the root of the output norm.
    """

    decay_per_channel = True
    fused_token = True
    head_weights = ("in_proj.q.weight", None, "in_proj.i.weight", "o_proj.weight")  # keys follow from decays

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int | None = None,
        lower_bounds: Callable[[int, int], LowerBounds] | None = LowerBounds,
        q: Features = Features(activation="silu"),
        k: Features = Features(),
        v: Features = Features(),
        norm: Callable[[int, float], Norm] = RMSNorm,
        norm_eps: float = 1e-5,
    ):
        site = checked_site(site, type(self))
        width = site.hidden_size
        check_sizes({"head_dim": head_dim})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        if head_dim is None:
            head_dim = site.heads()[1] if width % HEAD_DIM else HEAD_DIM
        if width % head_dim:
            raise kernels.UserError(f"head_dim: {head_dim} does not divide hidden_size {width}")
        super().__init__(site, num_heads=width // head_dim, key_size=head_dim, value_size=head_dim, q=q, k=k, v=v)
        self.in_proj = Projection(width, {"q": width, "f": width, "i": width})
        channels = self.gate_heads * self.subhead_size
        self.lower_bounds = build_lower_bounds(lower_bounds, site, channels)
        self.g_norm, self.o_proj = norm(width, norm_eps), OutputProjection(width, width)

    def share(self, below: Sequence[TokenMixer]) -> None:
        adopt_lower_bounds(self, below)

    def project(self, x: Tensor) -> Streams:
        q, f, i = self.in_proj(x)
        return Streams(split_heads(q, self.num_heads), split_heads(f, self.num_heads), split_heads(i, self.num_heads))

    def gates(self, s: Streams) -> Streams:
        odds = None if self.lower_bounds is None else self.lower_bounds.odds(self.site.layer)
        log_decay, written = kernels.tied_gates(s.k.flatten(2), odds=odds, dtype=s.q.dtype)
        return s.replace(k=split_heads(written, self.gate_heads), log_decay=split_heads(log_decay, self.gate_heads))

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        bounds = self.lower_bounds
        if bounds is not None and not bounds.fused:
            return None
        decay = kernels.TiedGates() if bounds is None else kernels.TiedGates(bounds.weight, self.site.layer)
        return kernels.TokenOps(decay=decay)

    def token_readout(self, y: Tensor, s: Streams) -> Tensor:
        return self.readout(y, s)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.g_norm(o.flatten(2)))


class MergedHGRN2(MergedHeads):
    """HGRN2: the number of heads follows from their size."""

    grows = HGRN2

    def merged(self, factor: int) -> dict[str, object]:
        return {"head_dim": self.mixer.key_size * factor}
