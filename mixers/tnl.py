"""TransNormerLLM (TNL)."""

from collections.abc import Callable

from torch import Tensor

import kernels

from .arguments import check_numbers, check_sizes
from .base import LinearMixer, Site, Streams, checked_site
from .decay import ConstantDecay, alibi_slopes
from .features import Features
from .projection import Linear, OutputProjection, Projection, split_heads
from .registry import register


class LowRankGated(LinearMixer):
    """Output of TNL and cosFormer2: a norm without weight over the full width, times σ(W_up W_down x) of rank K.

    x is the layer's normed input. The paper's formula for the gate has the input before the norm.
    """

    fused_token = True

    def __init__(self, site: Site, *, num_heads: int | None, qk: Features, norm_eps: float):
        num_heads, head_dim = checked_site(site, type(self)).heads(num_heads)
        check_numbers({"norm_eps": norm_eps}, positive=False)
        super().__init__(site, num_heads=num_heads, key_size=head_dim, value_size=head_dim, q=qk, k=qk)
        self.norm_eps, width = norm_eps, site.hidden_size
        self.in_proj = Projection(width, {"q": width, "k": width, "v": width, "g": head_dim})
        self.g_up = Linear(head_dim, width, bias=False)
        self.o_proj = OutputProjection(width, width)

    def project(self, x: Tensor) -> Streams:
        q, k, v, g = self.in_proj(x)
        H = self.num_heads
        return Streams(split_heads(q, H), split_heads(k, H), split_heads(v, H), gate=self.g_up(g))

    def token_ops(self, s: Streams) -> kernels.TokenOps | None:
        return kernels.TokenOps(decay=self.gates(s).log_decay)

    def token_readout(self, y: Tensor, s: Streams) -> Tensor:
        return self.readout(y, s)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(kernels.gated_rms_norm(o.flatten(2), s.gate, None, self.norm_eps, activation="sigmoid"))


class LayerwiseAlibi(ConstantDecay):
    """log λ of head i in layer l is −ALiBi_i · (1 − l/(L − 1) + 1e-5), so that the top layer hardly forgets.

    This is what the authors' published model and their lightning-attention kernels do.

    Args:
        site: Where the layer sits in the model.
        count: Number of recurrences.
    """

    def __init__(self, site: Site, count: int):
        check_sizes({"count": count})
        depth = 1 - site.layer / max(site.num_layers - 1, 1) + 1e-5
        super().__init__([-slope * depth for slope in alibi_slopes(count)])


class LayerwiseLinear(ConstantDecay):
    """log λ of head i in layer l is −(8/H) · (1 − l/L) · i, i = 0 … H − 1, as in flash-linear-attention.

    Args:
        site: Where the layer sits in the model.
        count: Number of recurrences.
    """

    def __init__(self, site: Site, count: int):
        check_sizes({"count": count})
        super().__init__([-(8 / count) * (1 - site.layer / site.num_layers) * i for i in range(count)])


@register(recurrence="S_t = λ_{h,l} S_{t−1} + k_t v_tᵀ", paper="TransNormerLLM, arXiv 2307.14995")
class TNL(LowRankGated):
    """S_t = λ S_{t−1} + k_t v_tᵀ, λ fixed by head and layer (arXiv 2307.14995; 2406.16690, A.1.2).

    Published sources disagree on λ: `decay` chooses, and the default is that of the authors. With S subheads the slopes
    cover H·S recurrences. The output gate reads the layer's normed input; the paper's formula has the input before the
    norm.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        qk: Features of queries and keys.
        decay: The constant decays of all recurrences at a site: LayerwiseAlibi or LayerwiseLinear.
        norm_eps: Added inside the root of the output norm.
    """

    fused_token = True

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        qk: Features = Features(activation="silu"),
        decay: Callable[[Site, int], ConstantDecay] = LayerwiseAlibi,
        norm_eps: float = 1e-6,
    ):
        super().__init__(site, num_heads=num_heads, qk=qk, norm_eps=norm_eps)
        self.decay = decay(site, self.gate_heads)

    def gates(self, s: Streams) -> Streams:
        return s.replace(log_decay=self.decay(s.v))
