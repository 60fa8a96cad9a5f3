"""A block: a token mixer and an MLP on the residual stream, with the norms before them or after them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels import UserError, recomputing
from mixers import ContextParallel, Norm, TokenMixer, takes_context_parallel
from mixers.interface import checked_result
from zoo.lm.mlp import ChannelMixer


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP.

    The output of a block is added to the residual stream by the norm that follows, in the next block or the last one.

    Args:
        mixer: The token mixer.
        mlp: The channel mixer, if any.
        norm: Makes a norm of the residual stream's size.
        recompute: Whether a GPU computes what is cheap (norms, gates, gated products, expanded queries and keys) again
            in the backward pass, rather than keeping it.
    """

    def __init__(
        self, mixer: TokenMixer, mlp: ChannelMixer | None, norm: Callable[[], Norm], *, recompute: bool = True
    ):
        super().__init__()
        self.recompute = recompute
        self.mixer_norm, self.mixer = norm(), mixer
        self.mlp_norm = None if mlp is None else norm()
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        state: Any,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """x and y [B,T,hidden], whose sum is the residual stream, and a state → all three after the block."""
        # a compiler decides for itself
        if self.recompute and x.is_cuda and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with recomputing():
                return self._forward(x, y, state, cu_seqlens, context_parallel)
        return self._forward(x, y, state, cu_seqlens, context_parallel)

    def _forward(
        self,
        x: Tensor,
        y: Tensor | None,
        state: Any,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
    ) -> tuple[Tensor, Tensor, Any]:
        x, h = (x, self.mixer_norm(x)) if y is None else self.mixer_norm(x, y)
        y, state = mix(self.mixer, h, state, cu_seqlens, context_parallel)
        if self.mlp is not None and self.mlp_norm is not None:
            x, h = self.mlp_norm(x, y)
            y = self.mlp(h)
        return x, y, state


class PostNormBlock(Block):
    """x + norm(mixer(x)), then x + norm(mlp(x)) if there is an MLP (OLMo 2, arXiv 2501.00656). Otherwise a `Block`."""

    def _forward(
        self,
        x: Tensor,
        y: Tensor | None,
        state: Any,
        cu_seqlens: Tensor | None,
        context_parallel: ContextParallel | None,
    ) -> tuple[Tensor, Tensor, Any]:
        x = x if y is None else x + y
        y, state = mix(self.mixer, x, state, cu_seqlens, context_parallel)
        y = self.mixer_norm(y)
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + y
            y = self.mlp_norm(self.mlp(x))
        return x, y, state


def mix(
    mixer: TokenMixer, x: Tensor, state: Any, cu_seqlens: Tensor | None, context_parallel: ContextParallel | None
) -> tuple[Tensor, Any]:
    """Call a mixer; it needs the argument `context_parallel` only if there is one."""
    if context_parallel is None:
        return checked_result(mixer(x, state, cu_seqlens=cu_seqlens), mixer, x)
    if not takes_context_parallel(type(mixer)):
        raise UserError(f"context_parallel: {type(mixer).__name__} works on whole sequences only")
    return checked_result(mixer(x, state, cu_seqlens=cu_seqlens, context_parallel=context_parallel), mixer, x)
