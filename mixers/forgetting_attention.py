"""Forgetting attention (FoX)."""

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid

from .arguments import size_or
from .base import Site, TokenMixer, checked_input, checked_site, dense_flops, positions
from .context_parallel import ContextParallel
from .heads import HeadMap, attention_maps
from .key_cache import attend, attend_to_cache, takes_ops
from .norm import Output, RMSNorm, qk_norms
from .projection import OutputProjection, Projection, split_heads
from .registry import register
from .shift import shifted
from .state import History, Position, SlottedCache


class ForgettingState(NamedTuple):
    """The keys, values and log decays of all tokens, in chronological order and flush right."""

    k: SlottedCache  # [N,S,Hkv,D]
    v: SlottedCache  # as k
    log_decay: SlottedCache  # [N,S,H], at least fp32
    last: History  # keys and values before their shift [N,1,2·Hkv·D]; [N,1,0] without shift
    position: Position  # tokens seen [N], int64; the first S − position slots of a row are empty


@register(
    recurrence="o_t = Σ_{s≤t} softmax_s(q_t·k_s/√D + Σ_{s<l≤t} log f_l) v_s",
    paper="Forgetting Transformer, arXiv 2503.02130",
)
class ForgettingAttention(TokenMixer):
    """o_t = Σ_{s≤t} softmax_s(q_t·k_s/√D + Σ_{s<l≤t} log f_l) v_s, f_t = σ(W x_t + b), FoX (arXiv 2503.02130).

    Each head forgets by a gate that depends on the data, which takes the place of position embeddings. The Pro variant
    of the paper has `qk_norm: RMSNorm`, `shift: true` and `output: SigmoidGatedRMSNorm`; its norms of queries and keys
    have one weight per head, where these have one for all heads.

    Args:
        site: Where the layer sits in the model.
        num_heads: Query heads; the model's by default.
        head_dim: Size D of a head; hidden_size / num_heads by default.
        num_kv_heads: Key and value heads, shared by groups of query heads; num_heads by default.
        qk_norm: The norm of the queries and keys of each head, such as RMSNorm; null for none.
        shift: Whether a key becomes α_t k_{t−1} + (1 − α_t) k_t with α_t = σ(W x_t) for each head, and likewise values.
        output: Norm and gate of the output of each head, such as SigmoidGatedRMSNorm; null for none.
    """

    constant_state: ClassVar[bool] = False
    attention: ClassVar[Callable[..., Tensor]] = staticmethod(kernels.window_attention)
    keep_fp32 = ("f_bias",)

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        qk_norm: Callable[[int], RMSNorm] | None = None,
        shift: bool = False,
        output: Callable[[int], Output] | None = None,
    ):
        super().__init__()
        self.num_heads, self.head_dim = checked_site(site, type(self)).heads(num_heads, head_dim)
        self.num_kv_heads = size_or("num_kv_heads", num_kv_heads, self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise kernels.UserError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        width, self.kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_norm, self.k_norm = (None if qk_norm is None else qk_norm(self.head_dim) for _ in range(2))
        self.o_norm = None if output is None else output(self.head_dim)
        self.shift = shift
        widths = {"q": width, "k": self.kv_width, "v": self.kv_width, "f": self.num_heads}
        widths |= {"shift": 2 * self.num_kv_heads} if shift else {}
        widths |= {"g": width} if self.o_norm is not None and self.o_norm.gated else {}
        self.in_proj = Projection(site.hidden_size, widths)
        self.f_bias = nn.Parameter(torch.empty(self.num_heads))
        self.o_proj = OutputProjection(width, site.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.f_bias)

    def head_maps(self) -> dict[str, HeadMap]:
        return attention_maps(self.num_heads, self.num_kv_heads, self.head_dim, self.q_norm, self.k_norm)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        first_key: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: kernels.KeyCache | None = None,
    ) -> Tensor:
        where = {"first_key": first_key, "cu_seqlens": cu_seqlens, "cache": cache}
        return self.attention(q, k, v, log_decay=log_decay, **where)

    def forward(
        self,
        x: Tensor,
        state: ForgettingState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, ForgettingState | None]:
        if context_parallel is not None:
            context_parallel.check(state, cu_seqlens)
        parts = self.in_proj(checked_input(x, self.in_proj.in_features))
        streams = dict(zip(self.in_proj.widths, parts, strict=True))
        seen, cache = (None, None) if state is None else (state.position, state.k)
        _, following = positions(x, seen, cu_seqlens, cache=cache)
        last = None if state is None else state.last
        k, v, last = self._keys_and_values(streams, last, cu_seqlens, context_parallel)
        q = split_heads(streams["q"], self.num_heads)
        log_decay, ops, after = streams["f"], None, None
        if state is not None and takes_ops(self.attention, state.k):
            ops = kernels.AttentionOps(*qk_norms(self.q_norm, self.k_norm), decay_bias=self.f_bias)
        if ops is None or ops.q_norm is None:
            q, k = (x if norm is None else norm(x) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        if ops is None:
            log_decay = kernels.forget_gate(log_decay, self.f_bias)
        if state is None:
            o = attend(self._attend, q, (k, v, log_decay), None, cu_seqlens, context_parallel)
        else:
            caches = state.k, state.v, state.log_decay
            past = caches, state.position, None, cu_seqlens, following
            o, (k, v, decays) = attend_to_cache(self._attend, q, (k, v, log_decay), *past, ops)
            after = ForgettingState(k, v, decays, state.last if last is None else last, following)
        if self.o_norm is not None:
            o = self.o_norm(o, split_heads(streams["g"], self.num_heads) if "g" in streams else None)
        return self.o_proj(o.flatten(2)), after

    def _keys_and_values(
        self,
        streams: dict[str, Tensor],
        last: Tensor | None,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v [B,T,Hkv,D], shifted, and the last ones before their shift, if they are shifted."""
        k, v = streams["k"], streams["v"]
        if self.shift:
            both = torch.cat([k, v], -1)
            before, last = shifted(both, None if last is None else last[:, 0], cu_seqlens, context_parallel)
            last = None if last is None else last[:, None]
            share = sigmoid(streams["shift"])[..., None]
            both = split_heads(both, 2 * self.num_kv_heads)
            both = (both + share * (split_heads(before, 2 * self.num_kv_heads) - both)).flatten(2)
            k, v = both.chunk(2, -1)
        k, v = split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
        return k, v, last if self.shift else None

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ForgettingState:
        like = self.in_stream
        device, dtype = device or like.device, dtype or like.dtype
        cache = torch.zeros(batch_size, 0, self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return ForgettingState(
            cache,
            cache.clone(),
            torch.zeros(batch_size, 0, self.num_heads, device=device, dtype=wide),
            torch.zeros(batch_size, 1, 2 * self.kv_width if self.shift else 0, device=device, dtype=dtype),
            torch.zeros(batch_size, device=device, dtype=torch.int64),
        )

    def state_size(self, length: int | None = None) -> int | float:
        return (math.inf if length is None else length) * (2 * self.kv_width + self.num_heads)

    def flops(self, length: int) -> int:
        # further channels of queries and keys for sums of decays, each in two parts (kernels/window_attention/decay.py)
        channels = self.head_dim + 2 * (self.num_heads // self.num_kv_heads + 1)
        return dense_flops(self, length) + kernels.attention_flops(length, heads=self.num_heads, head_dim=channels)

    def masked_flops(self, length: int) -> int:
        return (self.flops(length) - dense_flops(self, length)) * (length - 1) // (2 * length)
