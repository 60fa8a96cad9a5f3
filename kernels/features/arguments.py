"""The arguments of `features`, checked once."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..core.documents import documents
from ..core.recompute import unnoted
from ..head_linear import head_linear
from .stages import ACTIVATIONS, NORMS


@dataclass  # not frozen: that takes five times as long to construct
class FeatureStream:
    """The arguments of one call of `features`, where they are explained, for `features_together`.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """

    x: Tensor  # [B,T,heads,size]; with `product` [B,T,G,K]
    weight: Tensor | None = None  # [C,1,W], C = heads·size
    bias: Tensor | None = None  # [C]
    activation: str = "identity"
    norm: str = "none"
    history: Tensor | None = None  # [N,W−1,C]; N = B without cu_seqlens
    return_history: bool = False
    cu_seqlens: Tensor | None = None  # [N+1]
    consume_history: bool = False  # whether a single token may write the next history into `history`
    product: Tensor | None = None  # [G,K,subheads·size]: each head is multiplied by its matrix first
    subheads: int = 1  # into how many heads the result of each is cut then
    before: str = "identity"  # activation of x in front of the product
    # Inside `recomputing()`: whether the result is saved for the backward pass. False: it is recomputed. None: it is
    # recomputed only if x is, or if it is multiplied by `product`.
    kept: bool | None = None

    def __post_init__(self) -> None:
        x, weight, bias = self.x, self.weight, self.bias
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(f"x: expected a floating [B,T,heads,size], got {x.dtype} {tuple(x.shape)}")
        if self.subheads < 1:
            raise ValueError(f"subheads: must be at least 1, got {self.subheads}")
        if x.shape[1] < 1:
            raise ValueError("x: a sequence needs at least one token")
        if (product := self.product) is not None:
            if product.dim() != 3 or product.shape[:2] != x.shape[2:] or product.shape[2] % self.subheads:
                wanted = f"[{x.shape[2]},{x.shape[3]},N] with a multiple N of {self.subheads} subheads"
                raise ValueError(f"product: expected {wanted}, got shape {tuple(product.shape)}")
            if (dtype := autocast_dtype(x.device)) is not None:
                self.x = x = x.to(dtype)
        C = self.channels
        if weight is not None and (weight.dim() != 3 or weight.shape[:2] != (C, 1)):
            raise ValueError(f"weight: expected [{C},1,W], got shape {tuple(weight.shape)}")
        if bias is not None and (weight is None or bias.shape != (C,)):
            raise ValueError(f"bias: expected [{C}] and a weight, got shape {tuple(bias.shape)}")
        if self.before != "identity" and product is None:
            raise ValueError(f"before: {self.before!r} needs a product; without one, give an activation")
        named = (("activation", self.activation, ACTIVATIONS), ("norm", self.norm, NORMS))
        for name, value, choices in (*named, ("before", self.before, ACTIVATIONS)):
            if value not in choices:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}")
        if self.cu_seqlens is not None and not torch.compiler.is_compiling():  # values are unknown while tracing
            documents(self.cu_seqlens, x.shape[1], x.shape[0], x.device)
        past = (self.sequences, self.taps - 1, C)
        if self.history is not None and tuple(self.history.shape) != past:
            raise ValueError(f"history: expected {list(past)}, got shape {tuple(self.history.shape)}")

    @property
    def taps(self) -> int:
        return 1 if self.weight is None else self.weight.shape[2]

    @property
    def channels(self) -> int:
        return self.x.shape[2] * (self.x.shape[3] if self.product is None else self.product.shape[2])

    @property
    def size(self) -> int:
        """Channels of a head of the result."""
        return self.x.shape[3] if self.product is None else self.product.shape[2] // self.subheads

    @property
    def is_identity(self) -> bool:
        """Return whether x, or its product, gets no convolution, activation or norm."""
        return self.weight is None and self.activation == "identity" and self.norm == "none"

    def in_front(self) -> "FeatureStream":
        """Return the stream of the activation `before` alone, whose result is recomputed; self if there is none."""
        return self if self.before == "identity" else FeatureStream(self.x, activation=self.before, kept=False)

    def behind(self, x: Tensor) -> "FeatureStream":
        """Return the stream of the product and what follows it, for x as `in_front` makes it."""
        return replace(self, x=x, before="identity")

    def multiplied(self) -> "FeatureStream":
        """Return the stream after its product, which becomes x; inside `recomputing()`, x is saved if it is `kept`."""
        saved = self.is_identity and bool(self.kept)
        if self.product is None:
            if saved:  # x is the result
                unnoted(self.x)
            return self
        x = head_linear(self.x, self.product, save_result=saved)
        x = x.view(*x.shape[:2], x.shape[2] * self.subheads, self.size)
        rest = (self.history, self.return_history, self.cu_seqlens, self.consume_history)
        return FeatureStream(x, self.weight, self.bias, self.activation, self.norm, *rest, kept=self.kept)

    @property
    def sequences(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def differentiated(self) -> bool:
        tensors = (self.x, self.product, self.weight, self.bias, self.history)
        return torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in tensors)

    def past(self) -> Tensor:
        """The inputs before the first token [N,W−1,C] in the dtype of x: the history, or zeros."""
        if self.history is not None:
            return self.history.to(self.x.dtype)
        return self.x.new_zeros(self.sequences, self.taps - 1, self.channels)
