"""TransNormerLLM (TNL)."""

from torch import Tensor, nn

import kernels

from .base import LinearMixer, Site, Streams
from .decay import ConstantDecay, alibi_slopes
from .features import Features
from .projection import Projection, split_heads
from .registry import register


class LowRankGated(LinearMixer):
    """What TNL and cosFormer2 share: a weightless norm over the full width × σ(W_up W_down x), bottleneck K."""

    def __init__(self, site: Site, *, num_heads: int | None, qk: Features):
        num_heads, head_dim = site.heads(num_heads)
        super().__init__(site, num_heads=num_heads, key_size=head_dim, value_size=head_dim, q=qk, k=qk)
        width = site.hidden_size
        self.in_proj = Projection(width, {"q": width, "k": width, "v": width, "g": head_dim})
        self.g_up = nn.Linear(head_dim, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def project(self, x: Tensor) -> Streams:
        q, k, v, g = self.in_proj(x)
        H = self.num_heads
        return Streams(split_heads(q, H), split_heads(k, H), split_heads(v, H), gate=self.g_up(g))

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(kernels.rms_norm(o.flatten(2)) * s.gate.sigmoid())


@register(recurrence="S_t = λ_{h,l} S_{t−1} + k_t v_tᵀ", paper="TransNormerLLM, arXiv 2307.14995")
class TNL(LowRankGated):
    """S_t = λ S_{t−1} + k_t v_tᵀ, λ fixed by head and layer (arXiv 2307.14995; 2406.16690, A.1.2).

    log λ of head i in layer l is −ALiBi_i · (1 − l/(L − 1) + 1e-5): the top layer hardly forgets. That is what the
    authors' published model and their lightning-attention kernels do; other implementations disagree (flash-linear-
    attention and xmixers scale the slopes by other functions of l). With S subheads, ALiBi runs over H·S.

    Args:
        site: Where the layer stands.
        num_heads: Heads; the model's by default.
        qk: Features of queries and keys.
    """

    def __init__(self, site: Site, *, num_heads: int | None = None, qk: Features = Features(activation="silu")):
        super().__init__(site, num_heads=num_heads, qk=qk)
        depth = 1 - site.layer / max(site.num_layers - 1, 1) + 1e-5
        self.decay = ConstantDecay([-slope * depth for slope in alibi_slopes(self.gate_heads)])

    def gates(self, s: Streams) -> Streams:
        return s.replace(log_decay=self.decay(s.v))
