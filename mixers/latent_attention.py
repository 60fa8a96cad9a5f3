"""Multi-head latent attention (MLA)."""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

import kernels

from .arguments import check_sizes, size_or
from .attention import Per, gate_width, gated
from .base import Site, TokenMixer, checked_input, checked_site, dense_flops, positions
from .context_parallel import ContextParallel
from .features import Rotary
from .key_cache import attend, attend_to_cache, takes_ops
from .norm import RMSNorm, qk_norms
from .projection import Linear, OutputProjection, Projection, adjacent, head_products, split_heads
from .registry import register
from .state import Position, SlottedCache


class LatentState(NamedTuple):
    """The latents of all tokens, in chronological order and flush right."""

    latent: SlottedCache  # [N,S,kv_rank+rope_dim]: the normed latent, and the key channels that all heads share
    position: Position  # tokens seen [N], int64; the first S − position slots of a row are empty


@register(
    recurrence="o_t = Σ_{s≤t} softmax_s(q_t·[W_k c_s, r_s]/√D) W_v c_s",
    paper="DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437",
)
class MultiheadLatentAttention(TokenMixer):
    """o_t = Σ_{s≤t} softmax_s(q_t·[W_k c_s, r_s]/√D) W_v c_s, multi-head latent attention, MLA (arXiv 2405.04434).

    The keys and values of all heads are made from one latent c_t = norm(W x_t), and all keys end with the same channels
    r_t, which carry the positions. Only c_t and r_t are kept for later tokens. A single query attends to them directly,
    with W_k applied to the query and W_v to the output. Kimi K3 and Ling 3.0 multiply the output by a gate.

    Args:
        site: Where the layer sits in the model.
        num_heads: Heads; the model's by default.
        head_dim: Channels of a head's keys that are made from the latent; hidden_size / num_heads by default.
        rope_dim: Channels of a key that all heads share; half of head_dim by default, an even number. With 0, as in
            GLM-5.3-Flash, `rotary` must be null.
        value_dim: Value size of a head; head_dim by default.
        kv_rank: Size of the latent; by default 4 · head_dim, and at most half of hidden_size.
        q_rank: Size of a latent that queries are made from; null for queries made from x.
        rotary: The positions of the shared channels; null for none, as in Kimi Linear.
        norm: The norm of the latents.
        gate: Whether σ(W x) multiplies the output, per `head` (Ling 3.0) or per `channel` (Kimi K3); null for no gate.
    """

    constant_state: ClassVar[bool] = False
    attention: ClassVar[Callable[..., Tensor]] = staticmethod(kernels.window_attention)

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        rope_dim: int | None = None,
        value_dim: int | None = None,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        rotary: Callable[[int, int], Rotary] | None = Rotary,
        norm: Callable[[int], RMSNorm] = RMSNorm,
        gate: Per | None = None,
    ):
        super().__init__()
        H, head_dim = checked_site(site, type(self)).heads(num_heads, head_dim)
        check_sizes({"q_rank": q_rank})
        check_sizes({"rope_dim": rope_dim}, least=0)
        self.num_heads, self.head_dim, self.gate = H, head_dim, gate
        self.rope_dim = max(head_dim // 4, 1) * 2 if rope_dim is None else rope_dim
        self.value_dim = size_or("value_dim", value_dim, head_dim)
        self.kv_rank = size_or("kv_rank", kv_rank, max(min(4 * head_dim, site.hidden_size // 2), 1))
        if rotary is not None and self.rope_dim % 2:
            raise kernels.UserError(f"rope_dim: {self.rope_dim} is odd; rotary embedding needs pairs")
        if rotary is not None and not self.rope_dim:
            raise kernels.UserError("rope_dim: 0 leaves no channels for positions; set rotary to null")
        self.rotary = None if rotary is None else rotary(H, self.rope_dim)
        queries = H * (head_dim + self.rope_dim)
        widths = {"q": queries if q_rank is None else q_rank, "latent": self.kv_rank, "shared": self.rope_dim}
        if not self.rope_dim:
            del widths["shared"]
        widths |= gate_width(gate, H, self.value_dim)
        self.in_proj = Projection(site.hidden_size, widths)
        self.q_norm = None if q_rank is None else norm(q_rank)
        self.q_up = None if q_rank is None else Linear(q_rank, queries, bias=False)
        self.latent_norm = norm(self.kv_rank)
        self.kv_up = Linear(self.kv_rank, H * (head_dim + self.value_dim), bias=False)
        self.o_proj = OutputProjection(H * self.value_dim, site.hidden_size)

    def forward(
        self,
        x: Tensor,
        state: LatentState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, LatentState | None]:
        if context_parallel is not None:
            context_parallel.check(state, cu_seqlens)
        parts = dict(zip(self.in_proj.widths, self.in_proj(checked_input(x, self.in_proj.in_features)), strict=True))
        q, latent, shared, gate = parts["q"], parts["latent"], parts.get("shared"), parts.get("g")
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q = split_heads(q, self.num_heads)
        seen, cache = (None, None) if state is None else (state.position, state.latent)
        where, following = positions(x, seen, cu_seqlens, context_parallel, cache)
        ops = None if state is None else self._token_ops(q, state, gate)
        if ops is None:
            latent = self.latent_norm(latent)
            if self.rotary is not None and shared is not None:
                q, shared = self.rotary.turn_last(q, shared[:, :, None], where)
        if shared is not None:
            latent = torch.cat([latent, shared.flatten(2)], -1) if ops is None else adjacent(latent, shared)
        gate = gate if ops is None or ops.gate is None else None
        if state is None:
            o = attend(self._attention, q, [latent], None, cu_seqlens, context_parallel)
            return self._out(o, gate), None
        past = [state.latent], state.position, None, cu_seqlens, following, ops
        o, (latent,) = attend_to_cache(self._attention, q, [latent], *past)
        return self._out(o, gate), LatentState(latent, following)

    def _token_ops(self, q: Tensor, state: LatentState, gate: Tensor | None) -> kernels.AttentionOps | None:
        """Return norm, positions and gate of a token as arguments of attention; a gate per head may precede W_v."""
        norm, _ = qk_norms(self.latent_norm, self.latent_norm)
        rotary, rest = self.rotary, q[..., self.head_dim :] if self.rope_dim else None
        turn = None if rotary is None else rotary.turn(q, state.position, last=True)
        fits = takes_ops(self.attention, state.latent) and q.dtype == self.kv_up.weight.dtype
        if not fits or norm is None or (turn is None and rotary is not None) or torch.is_grad_enabled():
            return None
        return kernels.AttentionOps(None, norm, norm, turn, gate=gate if self.gate == "head" else None, q_rest=rest)

    def _out(self, o: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            o = gated(o, gate)
        return self.o_proj(o.flatten(2))

    def _attention(
        self,
        q: Tensor,
        latent: Tensor,
        first_key: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: kernels.KeyCache | None = None,
    ) -> Tensor:
        """o [B,T,H,V] of q [B,T,H,head_dim+rope_dim] and latent [B,S,kv_rank+rope_dim]."""
        attention = partial(self.attention, scale=q.shape[3] ** -0.5, first_key=first_key, cu_seqlens=cu_seqlens)
        # in deterministic mode a token takes the products of longer sequences
        if cache is not None or (q.shape[1] == 1 and not kernels.is_deterministic()):
            return self._one_query(q, latent, attention, cache)
        latent, shared = latent.split([self.kv_rank, self.rope_dim], -1)
        k, v = split_heads(self.kv_up(latent), self.num_heads).split([self.head_dim, self.value_dim], -1)
        k = torch.cat([k, shared[:, :, None].expand(-1, -1, self.num_heads, -1)], -1)
        return attention(q, k, v.contiguous())

    def _one_query(
        self, q: Tensor, latent: Tensor, attention: Callable[..., Tensor], cache: kernels.KeyCache | None
    ) -> Tensor:
        """Attend to the latents themselves, as one head of keys and values; `cache.ops` has what turns of a query."""
        up = self.kv_up.weight.unflatten(0, (self.num_heads, -1))
        to_k, to_v = up.split([self.head_dim, self.value_dim], 1)  # [H,size,kv_rank]
        q, turning = q.split([self.head_dim, self.rope_dim], -1)
        q = head_products(q, to_k, turning if cache is None or cache.ops is None else None, latent.shape[2])
        k, v = self._one_head(latent)
        cache = cache if cache is None else cache._replace(entries=self._one_head(*cache.entries))
        o = attention(q, k, v, cache=cache)
        return torch.einsum("bthr,hvr->bthv", o, to_v)

    def _one_head(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B,S,1,kv_rank+rope_dim] and values [B,S,1,kv_rank] that all heads share."""
        return latent[:, :, None], latent[:, :, None, : self.kv_rank]

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LatentState:
        like = self.in_stream
        device, dtype = device or like.device, dtype or like.dtype
        return LatentState(
            torch.zeros(batch_size, 0, self.kv_rank + self.rope_dim, device=device, dtype=dtype),
            torch.zeros(batch_size, device=device, dtype=torch.int64),
        )

    def state_size(self, length: int | None = None) -> int | float:
        return (math.inf if length is None else length) * (self.kv_rank + self.rope_dim)

    def flops(self, length: int) -> int:
        return dense_flops(self, length) + kernels.attention_flops(
            length, heads=self.num_heads, head_dim=self.head_dim + self.rope_dim, value_dim=self.value_dim
        )

    def masked_flops(self, length: int) -> int:
        return (self.flops(length) - dense_flops(self, length)) * (length - 1) // (2 * length)
