"""Softmax attention."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

import kernels
from kernels.activation_gate import activation_gate
from kernels.core.elementwise import sigmoid

from .arguments import check_numbers, size_or
from .base import Site, TokenMixer, checked_input, checked_site, dense_flops, positions
from .context_parallel import ContextParallel
from .features import FeaturePath, Features, Rotary, alike, together
from .heads import HeadMap, attention_maps
from .key_cache import attend, attend_to_cache, takes_ops
from .norm import RMSNorm, qk_norms
from .projection import OutputProjection, Projection, split_heads
from .registry import register
from .state import History, Position, SlottedCache

Per = Literal["head", "channel"]
Over = Literal["head", "width"]


def gate_width(gate: Per | None, heads: int, size: int) -> dict[str, int]:
    """Return the width of the output gate's projection under its name; nothing if there is no gate."""
    if gate is None:
        return {}
    if gate not in get_args(Per):
        raise kernels.UserError(f"gate: {gate!r} is not one of {', '.join(get_args(Per))}, or null")
    return {"g": heads if gate == "head" else heads * size}


def gated(o: Tensor, gate: Tensor) -> Tensor:
    """Return σ(gate) · o [B,T,H·V] of o [B,T,H,V], for the gate of each head [B,T,H] or channel [B,T,H·V]."""
    if gate.shape[2] == o.shape[2]:
        return (o * sigmoid(gate)[..., None]).flatten(2)
    return activation_gate(gate, o.flatten(2))


class AttentionState(NamedTuple):
    """The last keys and values, in chronological order and flush right."""

    k: SlottedCache  # [N,S,Hkv,D]; S grows without a window, and is window_size − 1 with one
    v: SlottedCache  # as k
    histories: tuple[History, ...]  # last conv inputs of q and k; empty without conv
    position: Position  # tokens seen [N], int64; the first S − position slots of a row are empty


@register(recurrence="o_t = Σ_{s≤t} softmax_s(q_t·k_s/√D) v_s", paper="Attention is all you need, arXiv 1706.03762")
class SoftmaxAttention(TokenMixer):
    """o_t = Σ_{s≤t} softmax_s(q_t·k_s/√D) v_s, with rotary positions (arXiv 1706.03762, 2104.09864).

    Args:
        site: Where the layer sits in the model.
        num_heads: Query heads; the model's by default.
        head_dim: Size D of a head; hidden_size / num_heads by default.
        num_kv_heads: Key and value heads, shared by groups of query heads; num_heads by default.
        qk: Features of queries and keys: by default rotary positions; `map: null` leaves positions out.
        qk_norm: The norm of queries and keys before their features, such as RMSNorm; null for none.
        qk_norm_over: What it normalises: each `head` separately, with one weight for all heads (Qwen3), or the whole
            `width` of all heads together (OLMo 3).
        gate: Whether σ(W x) multiplies the output, per `head` or per `channel` (arXiv 2505.06708); null for no gate.
        bias: Whether the projections of queries, keys, values and gate have biases.
        output_bias: Whether the output projection has one.
        scale: Factor of the scores q·k; null for 1/√D.
    """

    constant_state: ClassVar[bool] = False
    attention: ClassVar[Callable[..., Tensor]] = staticmethod(kernels.window_attention)
    window_size: int | None = None

    def __init__(
        self,
        site: Site,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        qk: Features = Features(map=Rotary),
        qk_norm: Callable[[int], RMSNorm] | None = None,
        qk_norm_over: Over = "head",
        gate: Per | None = None,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
    ):
        super().__init__()
        self.num_heads, self.head_dim = checked_site(site, type(self)).heads(num_heads, head_dim)
        self.num_kv_heads = size_or("num_kv_heads", num_kv_heads, self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise kernels.UserError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        check_numbers({"scale": scale})
        self.scale = self.head_dim**-0.5 if scale is None else scale
        if qk_norm_over not in get_args(Over):
            raise kernels.UserError(f"qk_norm_over: {qk_norm_over!r} is not one of {', '.join(get_args(Over))}")
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = {"q": width, "k": kv_width, "v": kv_width}
        widths |= gate_width(gate, self.num_heads, self.head_dim)
        self.in_proj = Projection(site.hidden_size, widths, bias=bias)
        self.qk_norm_over, sizes = qk_norm_over, (self.head_dim,) * 2 if qk_norm_over == "head" else (width, kv_width)
        self.q_norm, self.k_norm = (None if qk_norm is None else qk_norm(size) for size in sizes)
        self.q_features = FeaturePath(qk, self.num_heads, self.head_dim)
        self.k_features = FeaturePath(qk, self.num_kv_heads, self.head_dim)
        self.o_proj = OutputProjection(width, site.hidden_size, bias=output_bias)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        q, k, v, *gate = self.in_proj(checked_input(x, self.in_proj.in_features))
        q, k, v = split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
        seen, before = (None, (None, None)) if state is None else (state.position, state.histories)
        if context_parallel is not None:
            context_parallel.check(state, cu_seqlens)
        where, following = positions(x, seen, cu_seqlens, context_parallel, None if state is None else state.k)
        run, cache = partial(self.attention, window_size=self.window_size, scale=self.scale), None
        ops = None if state is None else self._token_ops(q, state, gate[0] if gate else None)
        if ops is None or ops.q_norm is None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if ops is None:
            paths = self.q_features, self.k_features
            results, _, _ = together(paths, [q, k], before, where, cu_seqlens, context_parallel)
            (q, k), histories = zip(*results, strict=True)
        else:
            gate, histories = [], before
        if state is None:
            o = attend(run, q, (k, v), self.window_size, cu_seqlens, context_parallel)
        else:
            caches = state.k, state.v
            past = caches, state.position, self.window_size, cu_seqlens, following, ops
            o, (k, v) = attend_to_cache(run, q, (k, v), *past)
            cache = AttentionState(k, v, histories, following)
        if gate:
            o = gated(o, gate[0])
        return self.o_proj(o.flatten(2)), cache

    def _token_ops(self, q: Tensor, state: AttentionState, gate: Tensor | None) -> kernels.AttentionOps | None:
        """Return a token's norms, positions and gate for attention; None if it cannot compute these positions.

        Norms that it cannot compute are left out, and `forward` applies them.
        """
        paths = self.q_features, self.k_features
        if not takes_ops(self.attention, state.k) or not alike(*paths):
            return None
        turn = None if paths[0].map is None else paths[0].map.turn(q, state.position)
        if (turn is None or turn.doubles) and paths[0].map is not None:
            return None
        if any(replace(path.spec, map=None) != Features() for path in paths):
            return None
        norms = qk_norms(self.q_norm, self.k_norm) if self.qk_norm_over == "head" else (None, None)
        return kernels.AttentionOps(*norms, turn=turn, gate=gate)

    def _normed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Queries or keys [B,T,heads,D] after their norm, if they have one."""
        if norm is None:
            return x
        return norm(x) if self.qk_norm_over == "head" else norm(x.flatten(2)).view_as(x)

    def head_maps(self) -> dict[str, HeadMap]:
        return attention_maps(self.num_heads, self.num_kv_heads, self.head_dim, self.q_norm, self.k_norm)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> AttentionState:
        like = self.in_stream
        device, dtype = device or like.device, dtype or like.dtype
        size = 0 if self.window_size is None else self.window_size - 1
        cache = torch.zeros(batch_size, size, self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        return AttentionState(
            cache,
            cache.clone(),
            tuple(path.init_history(batch_size, device, dtype) for path in (self.q_features, self.k_features)),
            torch.zeros(batch_size, device=device, dtype=torch.int64),
        )

    def state_size(self, length: int | None = None) -> int | float:
        keys = math.inf if length is None else length
        if self.window_size is not None:
            keys = min(keys, self.window_size - 1)
        return 2 * keys * self.num_kv_heads * self.head_dim

    def flops(self, length: int) -> int:
        return dense_flops(self, length) + kernels.attention_flops(
            length, heads=self.num_heads, head_dim=self.head_dim, window_size=self.window_size
        )

    def masked_flops(self, length: int) -> int:
        w, width = min(length, self.window_size or length), self.num_heads * self.head_dim  # token t sees up to w
        return self.flops(length) - dense_flops(self, length) - 2 * width * w * (2 * length - w + 1)
