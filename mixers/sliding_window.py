"""Sliding-window attention."""

from collections.abc import Callable
from typing import ClassVar

from .arguments import check_sizes
from .attention import Over, Per, SoftmaxAttention
from .base import Site
from .features import Features, Rotary
from .norm import RMSNorm
from .registry import register


@register(
    recurrence="o_t = Σ_{t−w<s≤t} softmax_s(q_t·k_s/√D) v_s",
    paper="Longformer, arXiv 2004.05150; Mistral 7B, arXiv 2310.06825",
    tiny={"window_size": 6},
)
class SlidingWindowAttention(SoftmaxAttention):
    """o_t = Σ_{t−w<s≤t} softmax_s(q_t·k_s/√D) v_s: softmax attention over the last w tokens, including the current one.

    Args:
        site: Where the layer sits in the model.
        window_size: w, the number of tokens that a query sees, including its own; the model's by default.
        num_heads: Query heads; the model's by default.
        head_dim: Size D of a head; hidden_size / num_heads by default.
        num_kv_heads: Key and value heads, shared by groups of query heads; num_heads by default.
        qk: Features of queries and keys: by default rotary positions; `map: null` leaves positions out.
        qk_norm: The norm of queries and keys before their features, such as RMSNorm or ZeroCentredRMSNorm; null for
            none.
        qk_norm_over: What it normalises: each `head` separately, with one weight for all heads (Qwen3), or the whole
            `width` of all heads together (OLMo 3).
        gate: Whether σ(W x) multiplies the output, a number per `head` or per `channel` (Qwen3-Next; arXiv
            2505.06708); null for no gate.
        bias: Whether the projections of queries, keys, values and gate have biases.
        output_bias: Whether the output projection has one.
    """

    constant_state: ClassVar[bool] = True

    def __init__(
        self,
        site: Site,
        *,
        window_size: int | None = None,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        qk: Features = Features(map=Rotary),
        qk_norm: Callable[[int], RMSNorm] | None = None,
        qk_norm_over: Over = "head",
        gate: Per | None = None,
        bias: bool = False,
        output_bias: bool = False,
    ):
        super().__init__(
            site,
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            qk=qk,
            qk_norm=qk_norm,
            qk_norm_over=qk_norm_over,
            gate=gate,
            bias=bias,
            output_bias=output_bias,
        )
        size = site.window_size if window_size is None else window_size
        check_sizes({"window_size": size}, least=2)  # the token itself counts
        self.window_size = size
