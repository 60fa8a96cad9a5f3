"""Gated slot attention (GSA)."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

import kernels
from kernels.core.elementwise import silu

from .arguments import check_numbers, check_sizes
from .base import Carried, LinearMixer, Site, Streams, checked_site
from .context_parallel import ContextParallel, run_recurrence
from .features import Features
from .norm import Norm, RMSNorm
from .projection import OutputProjection, Projection, split_heads
from .registry import register


@register(
    recurrence="P_t = diag(α_t) P_{t−1} + (1 − α_t) k_tᵀ,  S_t = diag(α_t) S_{t−1} + (1 − α_t) v_tᵀ,  "
    "y_t = S_tᵀ softmax(P_t q_t)",
    paper="Gated slot attention, arXiv 2409.07146",
    tiny={"num_slots": 16},
)
class GatedSlotAttention(LinearMixer):
    """y_t = S_tᵀ softmax(P_t q_t), with S_t = diag(α_t) S_{t−1} + (1 − α_t) v_tᵀ and P_t alike (arXiv 2409.07146).

    Each head has M slots. P holds their keys, and S their values, one row per slot. Slot i keeps the share
    α_i = σ(W_i x_t)^(1/8) of its key and value, and takes the rest from the token. Queries attend to the slots. The
    layer thus runs two linear recurrences with one decay per slot, and a softmax between them. Each subhead has M slots
    and a softmax.

    Args:
        site: Where the layer sits in the model.
        num_heads: Number of heads; the model's by default.
        num_slots: Number of slots M per head.
        expand_k: Total width of the keys, relative to hidden_size.
        expand_v: Total width of the values, relative to hidden_size.
        gate_normalizer: Divides log α; 8 makes the slots forget slowly.
        qk: Features of queries and keys.
        v: Features of values.
        norm: Output norm, such as RMSNorm or SimpleRMSNorm; it follows a SiLU.
        norm_eps: Added inside the root of the output norm.
    """

    decay_per_channel = True
    scale: ClassVar[float | None] = 1.0  # of both recurrences
    scores_recurrence: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]] = staticmethod(
        kernels.value_decay_recurrence
    )

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        num_slots: int = 64,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        gate_normalizer: float = 8.0,
        qk: Features = Features(activation="silu"),
        v: Features = Features(activation="silu"),
        norm: Callable[[int, float], Norm] = RMSNorm,
        norm_eps: float = 1e-5,
    ):
        num_heads, _ = checked_site(site, type(self)).heads(num_heads)
        check_sizes({"num_slots": num_slots})
        check_numbers({"expand_k": expand_k, "expand_v": expand_v, "gate_normalizer": gate_normalizer})
        check_numbers({"norm_eps": norm_eps}, positive=False)
        keys, values = round(site.hidden_size * expand_k), round(site.hidden_size * expand_v)
        for name, width in (("expand_k", keys), ("expand_v", values)):
            if not width or width % num_heads:
                raise kernels.UserError(f"{name}: a width of {width} cannot be divided into {num_heads} heads")
        key_size, value_size = keys // num_heads, values // num_heads
        super().__init__(site, num_heads=num_heads, key_size=key_size, value_size=value_size, q=qk, k=qk, v=v)
        self.num_slots, self.gate_normalizer = num_slots, gate_normalizer
        self.attention_gain, self.q_gain = self.q_gain, None  # applied after the softmax, which is not 0 for q = 0
        widths = {"q": keys, "k": keys, "v": values, "f": self.gate_heads * num_slots}
        self.in_proj = Projection(site.hidden_size, widths)
        self.g_norm, self.o_proj = norm(values, norm_eps), OutputProjection(values, site.hidden_size)

    @classmethod
    def sized_like(cls, num_heads: int, head_dim: int, hidden_size: int) -> dict[str, object]:
        return {"num_heads": num_heads, **dict.fromkeys(("expand_k", "expand_v"), num_heads * head_dim / hidden_size)}

    def project(self, x: Tensor) -> Streams:
        q, k, v, f = self.in_proj(x)
        H = self.num_heads
        return Streams(split_heads(q, H), split_heads(k, H), split_heads(v, H), log_decay=f)

    def gates(self, s: Streams) -> Streams:
        assert s.log_decay is not None
        log_decay, written = kernels.tied_gates(s.log_decay, scale=1 / self.gate_normalizer, dtype=s.q.dtype)
        log_decay, written = (split_heads(x, self.gate_heads) for x in (log_decay, written))
        return s.replace(log_decay=log_decay, gate=written)

    def carry(
        self, s: Streams, carried: Carried | None, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
    ) -> tuple[Streams, Carried]:
        """Replace queries by attention to the slots, and keys by the share 1 − α that each slot takes of a token."""
        written = s.gate
        scores, keys = run_recurrence(
            self.scores_recurrence,
            s.q,
            s.k,
            written,
            gates={"log_decay": s.log_decay, "scale": self.scale},
            initial_state=None if carried is None else carried[0],
            return_state=carried is not None,
            cu_seqlens=cu_seqlens,
            consume_state=True,
            context_parallel=context_parallel,
        )
        attention = scores.softmax(-1).to(s.q.dtype)
        if self.attention_gain is not None:
            attention = self.attention_gain(attention)
        return s.replace(q=attention, k=written, gate=None), () if keys is None else (keys,)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        heads, _, value_size = super().matrix_shape
        return heads, self.num_slots, value_size

    def init_carried(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> Carried:
        shape = (batch_size, self.gate_heads, self.num_slots, self.k_features.out_size)
        return (torch.zeros(shape, device=device, dtype=dtype),)

    def readout(self, o: Tensor, s: Streams) -> Tensor:
        return self.o_proj(self.g_norm(silu(o).flatten(2)))

    def flops(self, length: int) -> int:
        scores = kernels.recurrence_flops(
            kernels.value_decay_recurrence,
            length,
            heads=self.gate_heads,
            key_heads=self.gate_heads,
            subheads=1,
            key_size=self.k_features.out_size,
            value_size=self.num_slots,
        )
        return super().flops(length) + scores
