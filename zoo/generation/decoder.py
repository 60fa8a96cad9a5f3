"""Decoding token by token from a state; on a GPU as one CUDA graph, which costs as much to launch as one kernel."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zoo.generation.cuda_graph import capture, casts_not_cached

log = logging.getLogger(__name__)


class Decoder:
    """A language model that reads one more token of each sequence with every call.

    On a GPU the first call captures the step: from then on the state stays in the same memory, and every call is one
    launch. If a step cannot be captured (a state that grows, a mixer that waits for the device), the model is called
    directly, and the log says why. Weights must not move meanwhile.

    Args:
        model: A language model of the zoo.
        state: The state to start from, usually after a prompt; it is consumed.
        capture: Whether to capture; None to capture on a GPU without distributed training.

    Attributes:
        state: After all tokens so far. The next call may overwrite it.
        refused: Why the step could not be captured, if it was tried in vain.
    """

    def __init__(self, model: Any, state: Any, *, capture: bool | None = None) -> None:
        self.model, self.state = model, state
        self.refused: str | None = None
        self._capture = capture
        self._replay: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [B,1] int → logits [B,1,vocab]; the next call may overwrite them."""
        if self._capture is None:
            # a sharded model gathers its weights again in every step
            self._capture = tokens.is_cuda and not (dist.is_available() and dist.is_initialized())
        if self._capture and self._replay is None and self.refused is None:
            self._prepare(tokens)
        if self._replay is not None:
            if tokens.shape != self._tokens.shape:
                raise ValueError(f"tokens: expected {tuple(self._tokens.shape)}, got shape {tuple(tokens.shape)}")
            self._tokens.copy_(tokens)
            return self._replay()
        logits, self.state = self.model(tokens, self.state)
        return logits

    def _prepare(self, tokens: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad(), casts_not_cached():
            # the state after a prompt may consist of views, or of tensors that the caller still uses
            state, self._tokens = tree_map(_copy, self.state), tokens.clone()

            def rehearse() -> None:  # compiles kernels; must leave the state alone
                _, after = self.model(self._tokens, tree_map(_copy, state))
                if not fits(state, after):
                    raise RuntimeError("the state grows, or changes otherwise, with every token")

            def step() -> Tensor:
                logits, after = self.model(self._tokens, state)
                overwrite(state, after)
                return logits

            try:
                self._replay = capture(rehearse, step, tokens.device)
            except RuntimeError as error:
                self.refused = " ".join(str(error).split())
                log.info("decoding without a CUDA graph: %s", self.refused)
            else:
                self.state = state


def fits(state: Any, following: Any) -> bool:
    """Return whether the tensors of `state` can hold `following` without loss."""
    pairs = zip(tree_leaves(state), tree_leaves(following), strict=True)
    return all(old.shape == new.shape and torch.promote_types(old.dtype, new.dtype) == old.dtype for old, new in pairs)


def overwrite(state: Any, following: Any) -> None:
    """Copy `following` into the tensors of `state`, except what is already there."""
    pairs = list(zip(tree_leaves(state), tree_leaves(following), strict=True))
    owned = {old.untyped_storage().data_ptr() for old, _ in pairs}
    copies: dict[tuple[torch.dtype, ...], tuple[list[Tensor], list[Tensor]]] = {}  # few launches for many tensors
    for old, new in pairs:
        if new.numel() and new.data_ptr() != old.data_ptr():
            into, out_of = copies.setdefault((old.dtype, new.dtype), ([], []))
            into.append(old)
            # part of the old state might be overwritten before it is read
            out_of.append(new.clone() if new.untyped_storage().data_ptr() in owned else new)
    for into, out_of in copies.values():
        torch._foreach_copy_(into, out_of)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
