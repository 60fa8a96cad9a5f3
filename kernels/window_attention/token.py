"""Attention of one new token per row to earlier ones, in caches with room for more.

The entry of token t is at index t mod R of a cache [B,R,…], so nothing moves when a token is added. A cache that grows
has more entries than tokens; one of a window needs no more entries than the window has tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation_gate import activation_gate
from ..core.autocast import autocast_dtype
from ..core.autograd import plain
from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.tensors import check_tensors
from ..forget_gate import forget_gate
from ..norm import QKNorm
from ..rotary import Turn, rotary
from . import candidates, reference
from .arguments import Attention

LARGEST_KEY, LARGEST_VALUE = 1024, 512  # of the Triton kernels, which hold a query and an output in registers
# With more rows, norms and positions get launches of their own. The launches of attention repeat them for each part of
# the cache, which takes 9 µs longer for 64 rows.
MOST_TURNED = 8


class AttentionOps(NamedTuple):
    """Operations on one token before and after it attends, in the order of the fields."""

    q_norm: QKNorm | None = None  # of the query heads
    k_norm: QKNorm | None = None  # of the new key
    v_norm: QKNorm | None = None  # of the new value; `k_norm` if the values are the first channels of the keys
    turn: Turn | None = None  # positions of the query and the new key: pairs that turn
    decay_bias: Tensor | None = None  # [H]: log_decay has raw gates, and becomes `forget_gate(log_decay, decay_bias)`
    gate: Tensor | None = None  # per head [B,1,H] or channel [B,1,H·V]: the output becomes σ(gate) · o
    q_rest: Tensor | None = None  # [B,1,H,R]: the last R channels of the query, which are then not read from q

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [x for part in (*self[:4], self[4:]) for x in part or () if isinstance(x, Tensor)]


class KeyCache(NamedTuple):
    """Earlier tokens: that of number t is at index t mod R."""

    entries: tuple[Tensor, ...]  # keys [B,R,Hkv,D], values [B,R,Hkv,V], and log decays [B,R,H] if scores decay
    seen: Tensor  # [B] int64: number of earlier tokens of each row
    following: Tensor | None = None  # [B] int64, in other memory: becomes seen + 1; None if that is not needed
    ops: AttentionOps | None = None  # in the same launches where possible; None for attention alone


@dataclass(frozen=True)
class TokenAttention:
    """Checked arguments: one query, key and value per row, without `ops` in the dtype of the caches."""

    q: Tensor  # [B,1,H,D]
    new: tuple[Tensor, ...]  # the entries of the new token, as those of the cache
    cache: KeyCache
    window: int  # ≤ R: tokens that a query sees, including its own
    scale: float

    @property
    def shared(self) -> bool:
        """Return whether the values are the first channels of the keys, in the same memory."""
        k, v = self.cache.entries[:2]
        first = k.shape[2] == 1 and v.shape[3] <= k.shape[3] and v.stride(1) == k.stride(1)
        return first and v.data_ptr() == k.data_ptr()


def check_cache(a: Attention, window_size: int | None, cache: KeyCache, scale: float | None) -> TokenAttention:
    """Check a cache against the other arguments, which are checked already; `scale` may have been negative.

    Raises:
        ValueError: It does not fit them; the message starts with "cache".
    """
    decays = () if a.log_decay is None else (a.log_decay,)
    new, B = (a.k, a.v, *decays), len(a.q)
    if a.q.shape[1] != 1 or a.k.shape[1] != 1 or a.first_key is not None or a.cu_seqlens is not None:
        raise ValueError("cache: expected one token of each row, without first_key and cu_seqlens")
    if len(cache.entries) != len(new):
        raise ValueError(f"cache: expected {len(new)} entries, as there are new ones, got {len(cache.entries)}")
    check_tensors(**{"cache.seen": cache.seen}, **{f"cache.entries[{i}]": x for i, x in enumerate(cache.entries)})
    if cache.seen.shape != (B,) or cache.seen.dtype != torch.int64 or cache.seen.device != a.q.device:
        actual = f"{cache.seen.dtype} {tuple(cache.seen.shape)} on {cache.seen.device}"
        raise ValueError(f"cache.seen: expected an int64 [{B}] on {a.q.device}, got {actual}")
    after = cache.following
    if after is not None and (after.shape, after.dtype, after.device) != (cache.seen.shape, torch.int64, a.q.device):
        actual = f"{after.dtype} {tuple(after.shape)} on {after.device}"
        raise ValueError(f"cache.following: expected an int64 [{B}] on {a.q.device}, got {actual}")
    size = cache.entries[0].shape[1] if cache.entries[0].dim() > 1 else 0
    for number, (x, y) in enumerate(zip(cache.entries, new, strict=True)):
        expected = (B, max(size, 1), *y.shape[2:])
        if x.shape != expected or x.device != y.device or not x.is_floating_point():
            actual = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"cache.entries[{number}]: expected floats {[*expected]} on {y.device}, got {actual}")
    if cache.entries[1].dtype != cache.entries[0].dtype:
        raise ValueError(f"cache: has keys in {cache.entries[0].dtype}, but values in {cache.entries[1].dtype}")
    if torch.is_grad_enabled() and any(
        x.requires_grad for x in (a.q, *new, *(cache.ops.tensors() if cache.ops else ()))
    ):
        raise ValueError("cache: is written in place, and has no gradients; use torch.no_grad()")
    call = TokenAttention(a.q, new, cache, size if window_size is None else min(window_size, size), a.scale)
    if cache.ops is not None:
        check_ops(a, cache.ops, scale)
        if call.shared:
            check_shared(cache.ops, a.q.shape[3], a.v.shape[3])
    return call


def check_ops(a: Attention, ops: AttentionOps, scale: float | None) -> None:
    """Check the shapes of `ops` against the other arguments.

    Raises:
        ValueError: One does not fit them; the message starts with its name.
    """
    (B, _, H, D), V, turn = a.q.shape, a.v.shape[3], ops.turn
    for name, norm, most in (("q_norm", ops.q_norm, D), ("k_norm", ops.k_norm, D), ("v_norm", ops.v_norm, V)):
        shape = None if norm is None or norm.weight is None else norm.weight.shape
        if norm is not None and (not 0 < norm.size <= most or shape not in (None, (norm.size,))):
            raise ValueError(
                f"cache.ops.{name}: expected 1 to {most} channels, and a weight for each, got {norm.size} {shape}"
            )
    if turn is not None and (turn.doubles or not 0 < 2 * len(turn.rates) <= D or turn.positions.shape != (B,)):
        actual = f"shapes {tuple(turn.positions.shape)} and {tuple(turn.rates.shape)}"
        raise ValueError(f"cache.ops.turn: expected positions [{B}] and rates of 1 to {D // 2} pairs, got {actual}")
    if ops.decay_bias is not None and (a.log_decay is None or ops.decay_bias.shape != (H,)):
        raise ValueError(
            f"cache.ops.decay_bias: expected raw gates, and [{H}], got shape {tuple(ops.decay_bias.shape)}"
        )
    if ops.q_rest is not None and scale is not None and scale <= 0:
        raise ValueError(f"cache.ops.q_rest: needs a scale above 0, got {scale}")
    if ops.q_rest is not None and (ops.q_rest.shape[:3] != (B, 1, H) or not 0 < ops.q_rest.shape[3] < D):
        raise ValueError(f"cache.ops.q_rest: expected [{B},1,{H}, below {D}], got shape {tuple(ops.q_rest.shape)}")
    if ops.gate is not None and ops.gate.shape not in [(B, 1, H), (B, 1, H * V)]:
        raise ValueError(f"cache.ops.gate: expected [{B},1,{H}] or [{B},1,{H * V}], got shape {tuple(ops.gate.shape)}")


def check_shared(ops: AttentionOps, D: int, V: int) -> None:
    """Check `ops` where the values are the first V of the D channels of the keys, which are stored once.

    Raises:
        ValueError: Keys and values would differ; the message starts with "cache.ops".
    """
    if ops.k_norm is not ops.v_norm:
        raise ValueError("cache.ops.v_norm: must be k_norm, as the values are the first channels of the keys")
    if ops.turn is not None and (not ops.turn.last or D - 2 * len(ops.turn.rates) < V):
        raise ValueError(f"cache.ops.turn: must not turn the first {V} channels of the keys, which are the values")


def launched(a: TokenAttention, ops: AttentionOps) -> AttentionOps | None:
    """Return those of `ops` that the launches of attention compute, or None: no casts, nor norms of values alone."""
    q_norm, k_norm, v_norm, turn, bias, gate, rest = ops
    tensors, raw = [a.q, *a.new, *ops.tensors()], {x.dtype for x in (a.q, *a.new[:2], a.q if rest is None else rest)}
    if not plain(tensors) or is_deterministic() or autocast_dtype(a.q.device) is not None:
        return None
    if OP.backend(a.q, a) != "triton":
        return None
    fits = v_norm is (k_norm if a.shared else None)  # such values are written as part of the keys
    if rest is not None:  # neither the norm nor a pair has channels of both parts
        fits &= a.shared and q_norm is None and rest.shape[3] == a.q.shape[3] - a.new[1].shape[3]
        fits &= rest.stride(3) == 1 and (turn is None or (turn.last and 2 * len(turn.rates) <= rest.shape[3]))
    if not fits or raw != {a.cache.entries[0].dtype} or torch.float64 in {x.dtype for x in tensors}:
        return None
    many = turn is not None and rest is None and len(a.q) > MOST_TURNED
    return AttentionOps(decay_bias=bias, gate=gate) if many else ops


def prepared(a: TokenAttention, ops: AttentionOps, left: AttentionOps | None) -> TokenAttention:
    """Apply the norms, positions and decays of `ops` to the arguments, except those that are `left`."""
    q_norm, k_norm, v_norm, turn, bias, _, rest = ops
    q, (k, v, *decays) = a.q if rest is None else torch.cat([a.q[..., : -rest.shape[3]], rest], -1), a.new
    q, k, v = (x if norm is None else norm(x) for x, norm in ((q, q_norm), (k, k_norm), (v, v_norm)))
    if turn is not None:
        q, k = rotary(q, turn.positions[:, None], turn.rates, amplitude=turn.amplitude, last=turn.last, other=k)
    if left is not None:
        return replace(a, q=q, new=(k, v, *decays), cache=a.cache._replace(ops=left))
    decays = decays if bias is None else [forget_gate(decays[0], bias)]
    new = tuple(x.to(entry.dtype) for x, entry in zip((k, v, *decays), a.cache.entries, strict=True))
    return replace(a, q=q.to(new[0].dtype), new=new, cache=a.cache._replace(ops=None))


def composed(run: Callable[[Attention], Tensor], a: TokenAttention) -> Tensor:
    """o [B,1,H,V] in PyTorch: write the new entries, and attend to a copy of all that a query may see."""
    seen = a.cache.seen
    rows, size = torch.arange(len(a.q), device=seen.device), a.cache.entries[0].shape[1]
    for x, new in zip(a.cache.entries, a.new, strict=True):
        x[rows, seen % size] = new[:, 0]
    if a.cache.following is not None:
        torch.add(seen, 1, out=a.cache.following)
    token = seen[:, None] + torch.arange(1 - a.window, 1, device=seen.device)
    k, v, *decays = (x[rows[:, None], token % size] for x in a.cache.entries)
    first = (a.window - 1 - seen).clamp(min=0)
    return run(Attention(a.q, k, v, None, first, a.scale, None, None, *decays))


def limits(a: TokenAttention) -> str | None:
    """Return why the Triton kernels cannot compute a call; None if they can."""
    k, v, *decays = a.cache.entries
    if a.q.shape[3] > LARGEST_KEY or v.shape[3] > LARGEST_VALUE:
        return f"whose heads have at most {LARGEST_KEY} channels of keys and {LARGEST_VALUE} of values"
    whole = all(x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) for x in (k, v))
    whole &= all(x.stride(2) == 1 for x in decays)
    if not whole or any(len(x) > 1 and x.stride(0) != x.shape[1] * x.stride(1) for x in (k, v, *decays)):
        return "which needs caches whose entries are contiguous and follow each other"
    return None


OP = Op(
    "window_attention_token",
    reference=partial(composed, reference.forward),
    torch=partial(composed, candidates.forward),
    gpu="kernels.window_attention.gpu.token:forward",
    limits=limits,
)


def attend(a: TokenAttention) -> Tensor:
    """o [B,1,H,V] in the dtype of the new value; deterministic mode computes it as without a cache."""
    ops, dtype = a.cache.ops or AttentionOps(), a.new[1].dtype
    left = None if a.cache.ops is None else launched(a, ops)
    if left is not ops:
        a = prepared(a, ops, left)
    o: Tensor = composed(candidates.forward, a) if is_deterministic() else OP(a.q, a)
    if left is not None or ops.gate is None:
        return o.to(dtype)
    gate = ops.gate if ops.gate.shape[2] > o.shape[2] else ops.gate.repeat_interleave(o.shape[3], 2)
    return activation_gate(gate, o.to(dtype).flatten(2)).view(o.shape)
