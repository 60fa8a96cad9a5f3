"""Decoding token by token from a state; on a GPU as one CUDA graph, which costs as much to launch as one kernel."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zoo.generation.cuda_graph import no_graphs
from zoo.generation.graphs import KEPT_BYTES, DecodingGraphs, Graph, check_fits, overwrite
from zoo.lm.states import growing, take_states

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
        self.close()
        if no_graphs(tokens.device) is None:  # even if graphs are switched off, so that the switch changes no result
            reason = self._pad(graphs, tokens)
            if reason is not None:
                graphs.refuse(reason)
                return
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

    def _pad(self, graphs: DecodingGraphs, tokens: Tensor) -> str | None:
        """Pad a state that grows; return the reason if that is impossible."""
        self._padded = False
        leaves, grows = tree_leaves(self.state), growing(self.model, self.state)
        if not any(grows):
            return None
        length = max(leaf.shape[1] for leaf, more in zip(leaves, grows, strict=True) if more)
        room = min(self._room, max(16 * ROOM, length))  # most generations end long before their limit
        size = -(-(length + room) // ROOM) * ROOM
        if (memory := sum(leaf.nbytes for leaf in leaves)) > KEPT_BYTES:
            return f"a state that grows takes {memory / 2**30:.1f} GiB, and graphs hold at most {KEPT_BYTES >> 30} GiB"
        if self.model not in graphs.ignore_padding:
            one = take_states(self.state, [0])
            (x, after), (y, _) = (self.model(tokens[:1, None], _padded(one, grows, size, z)) for z in (0.0, 100.0))
            lengths = {new.shape[1] for new, more in zip(tree_leaves(after), grows, strict=True) if more}
            graphs.ignore_padding[self.model] = lengths == {size + 1} and torch.equal(x, y)
        self._padded = graphs.ignore_padding[self.model]
        if not self._padded:
            return "the state grows, and the model reads padding or removes it"
        self.state, self._left = _padded(self.state, grows, size, 0.0), size - length
        return None


def _padded(state: Any, grows: list[bool], size: int, value: float) -> Any:
    """Return a copy of a state whose growing tensors have `size` entries, with `value` in front."""

    def pad(leaf: Tensor, more: bool) -> Tensor:
        front = (0, 0) * (leaf.dim() - 2) + (size - leaf.shape[1], 0) if more else (0, 0)
        return F.pad(leaf, front, value=value)

    leaves, structure = tree_flatten(state)
    return tree_unflatten([*map(pad, leaves, grows)], structure)


def _without_first(before: Tensor, after: Tensor) -> Tensor:
    """`after` [B,S+1,…] without its first entry, if `before` is [B,S,…]; otherwise all of it."""
    grown = after.dim() > 1 and after.shape[1] == before.shape[1] + 1
    return after[:, 1:] if grown else after
