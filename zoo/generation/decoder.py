"""Decoding token by token from a state; on a GPU as one CUDA graph, which costs as much to launch as one kernel."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zoo.generation.cuda_graph import no_graphs
from zoo.generation.graphs import DecodingGraphs, Graph, check_fits, overwrite
from zoo.lm.states import growing

ROOM = 256  # tokens: the length of a growing state is a multiple of it


class Decoder:
    """A language model that reads one more token of each sequence with every call.

    With `graphs`, the first call captures the step: from then on the state stays in the same memory, and every call is
    one launch. A state that grows is padded in front, so that a step keeps its length: it drops an empty entry and
    appends the new one. Without room for another token, the next call pads and captures again. Weights must not move
    meanwhile.

    Args:
        model: A language model of the zoo.
        state: The state to start from, usually after a prompt; it is consumed.
        graphs: The owner of the graph; None to call the model directly.
        room: Number of tokens to come, if that is known; more are possible.

    Attributes:
        state: After all tokens so far. The next call may overwrite it.
    """

    def __init__(self, model: Any, state: Any, graphs: DecodingGraphs | None = None, *, room: int = ROOM) -> None:
        self.model, self.state = model, state
        self._graphs, self._room = graphs, room
        self._graph: Graph | None = None
        self._left: float = 0  # steps until the state needs more room
        self._padded = False

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [B] int → logits [B,vocab]; the next call may overwrite them."""
        if self._graphs is not None and not self._left:
            self._prepare(self._graphs, tokens)
        self._left -= 1
        if self._graph is None:
            eager, self.state = self._step(tokens, self.state)
            return eager
        held = self._graph.inputs[0]
        if tokens.shape != held.shape:
            raise ValueError(f"tokens: expected {tuple(held.shape)}, got shape {tuple(tokens.shape)}")
        held.copy_(tokens)
        logits: Tensor = self._graph.replay()
        return logits

    def close(self) -> None:
        """Return the graph to its owner; `state` may be overwritten from then on."""
        if self._graph is not None and self._graphs is not None:
            self._graphs.put_back(self._graph)
        self._graph = None

    def _prepare(self, graphs: DecodingGraphs, tokens: Tensor) -> None:
        self._left = math.inf
        if no_graphs(tokens.device) is None:  # even if graphs are switched off, so that the switch changes no result
            self._pad(graphs, tokens)
        self.close()
        self._graph = graphs.take(self.model, (tokens, self.state), self._in_place)
        if self._graph is not None:
            self.state = self._graph.inputs[1]

    def _in_place(self, tokens: Tensor, state: Any) -> Tensor:
        logits, after = self._step(tokens, state)
        check_fits(state, after)
        overwrite(state, after)
        return logits

    def _step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, after = self.model(tokens[:, None], state)
        return logits[:, -1], tree_map(_without_first, state, after) if self._padded else after

    def _pad(self, graphs: DecodingGraphs, tokens: Tensor) -> None:
        """Pad a state that grows, unless the model would notice."""
        leaves, structure = tree_flatten(self.state)
        grows = growing(self.model, self.state)
        if not any(grows):
            return
        length = max(leaf.shape[1] for leaf, more in zip(leaves, grows, strict=True) if more)
        size = -(-(length + self._room) // ROOM) * ROOM

        def padded(value: float) -> Any:
            pairs = zip(leaves, grows, strict=True)
            copies = [_padded(leaf, size, value) if more else leaf.clone() for leaf, more in pairs]
            return tree_unflatten(copies, structure)

        if self.model not in graphs.ignore_padding:
            (x, after), (y, _) = (self.model(tokens[:, None], padded(value)) for value in (0.0, 100.0))
            kept = all(new.shape[1] == size + 1 for new, more in zip(tree_leaves(after), grows, strict=True) if more)
            graphs.ignore_padding[self.model] = kept and torch.equal(x, y)
        self._padded = graphs.ignore_padding[self.model]
        if self._padded:
            self.state, self._left = padded(0.0), size - length


def _padded(leaf: Tensor, size: int, value: float) -> Tensor:
    return F.pad(leaf, (0, 0) * (leaf.dim() - 2) + (size - leaf.shape[1], 0), value=value)


def _without_first(before: Tensor, after: Tensor) -> Tensor:
    """`after` [B,S+1,…] without its first entry, if `before` is [B,S,…]; otherwise all of it."""
    grown = after.dim() > 1 and after.shape[1] == before.shape[1] + 1
    return after[:, 1:] if grown else after
