"""cosFormer2."""

from .base import Site
from .features import LRPE, Features
from .registry import register
from .tnl import LowRankGated


@register(
    recurrence="S_t = S_{t−1} + [cos(θt)·k_t, sin(θt)·k_t] v_tᵀ",
    paper="Scaling laws for linear complexity language models, arXiv 2406.16690",
)
class CosFormer2(LowRankGated):
    """S_t = S_{t−1} + k_t v_tᵀ with k = [cos(θt)·SiLU(W_k x), sin(θt)·SiLU(W_k x)] (arXiv 2406.16690, A.1.4).

    It has no decay: positions enter through LRPE, whose θ is learned and shared by queries and keys, and through TPE
    on the embedding (`model.position: TPE`). A norm replaces cosFormer's denominator. The output gate reads the layer's
    normed input, where the paper's formula has the input before the norm.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        qk: Features of queries and keys.
        norm_eps: Added inside the root of the output norm.
    """

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        qk: Features = Features(activation="silu", map=LRPE),
        norm_eps: float = 1e-6,
    ):
        super().__init__(site, num_heads=num_heads, qk=qk, norm_eps=norm_eps)
        self.k_features.map = self.q_features.map  # one θ for both
