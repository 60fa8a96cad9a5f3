"""Decoding token by token from a state; on a GPU as one CUDA graph, which costs as much to launch as one kernel."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels import is_deterministic
from kernels.core.torch_internals import tree_leaves
from zoo.generation.cuda_graph import no_graphs
from zoo.generation.graphs import DecodingGraphs, Graph, check_fits, overwrite
from zoo.lm.states import growing, grows_otherwise, with_room, without_room

ROOM = 256  # tokens: the length of a cache with room is a multiple of it


class Decoder:
    """A language model that reads one more token of each sequence with every call.

    With `graphs`, the first call captures the step: from then on the state stays in the same memory, and every call is
    one launch. Caches of keys then have room for later tokens, which a step adds in place. Without room for another
    token, the next call makes more and captures again. Weights must not move meanwhile.

    Args:
        model: A language model of the zoo.
        state: The state to start from, usually after a prompt; it is consumed.
        graphs: The owner of the graph; None to call the model directly.
        room: Number of tokens to come, if that is known; more are possible.
    """

    def __init__(self, model: Any, state: Any, graphs: DecodingGraphs | None = None, *, room: int = ROOM) -> None:
        self.model, self._state = model, state
        self._graphs, self._room = graphs, room
        self._graph: Graph | None = None
        self._left: float = 0  # steps until the state needs more room
        self._length: int | None = None  # tokens of the longest sequence, if caches have room

    @property
    def state(self) -> Any:
        """The state after all tokens so far. The next call may overwrite it."""
        return self._state if self._length is None else without_room(self.model, self._state, self._length)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [B] int → logits [B,vocab]; the next call may overwrite them."""
        if self._graphs is not None and not self._left:
            self._prepare(self._graphs, tokens)
        self._left -= 1
        if self._graph is None:
            logits, self._state = self._step(tokens, self._state)
        else:
            held = self._graph.inputs[0]
            if tokens.shape != held.shape:
                raise ValueError(f"tokens: expected {tuple(held.shape)}, got shape {tuple(tokens.shape)}")
            held.copy_(tokens)
            logits = self._graph.replay()
        self._length = None if self._length is None else self._length + 1
        return logits

    def close(self) -> None:
        """Return the graph to its owner; `state` may be overwritten from then on."""
        if self._graph is not None and self._graphs is not None:
            self._graphs.put_back(self._graph)
        self._graph = None

    def _prepare(self, graphs: DecodingGraphs, tokens: Tensor) -> None:
        self._left = math.inf
        reason = None
        if no_graphs(tokens.device) is None:  # even if graphs are switched off, so that the switch changes no result
            reason = self._make_room()
        self.close()
        if reason is not None:
            graphs.refuse(reason)
            return
        self._graph = graphs.take(self.model, (tokens, self._state), self._in_place)
        if self._graph is not None:
            self._state = self._graph.inputs[1]

    def _in_place(self, tokens: Tensor, state: Any) -> Tensor:
        logits, after = self._step(tokens, state)
        check_fits(state, after)
        overwrite(state, after)
        return logits

    def _step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, after = self.model(tokens[:, None], state)
        return logits[:, -1], after

    def _make_room(self) -> str | None:
        """Make room for tokens in the caches of the state; return the reason if that is impossible."""
        if is_deterministic():  # which computes a token as those of longer sequences
            grows = any(growing(self.model, self._state))
            return "the state grows, and deterministic mode adds no token in place" if grows else None
        length = self._length
        if length is None:
            if grows_otherwise(self.model, self._state):
                return "the state grows, and its mixer adds no token in place"
            pairs = zip(tree_leaves(self._state), growing(self.model, self._state), strict=True)
            length = max((leaf.shape[1] for leaf, more in pairs if more), default=0)
        room = max(1, min(self._room, max(16 * ROOM, length)))  # most generations end long before their limit
        size = -(-(length + room) // ROOM) * ROOM
        try:
            with torch.inference_mode(False), torch.no_grad():  # a kept graph may serve calls in another mode
                self._state, grows = with_room(self.model, self._state, size)
        except torch.OutOfMemoryError:
            self._state, self._length = self.state, None
            return f"the memory is too small for a copy of the state with room for {size} tokens"
        self._length, self._left = length, size - length if grows else math.inf
        return None
