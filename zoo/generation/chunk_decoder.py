"""Decoding in deterministic mode: every token has the logits, bit by bit, that training computes for it.

The state stays at the last multiple of `CHUNK` tokens, and every call computes what follows in time, such as
recurrences, for the chunk since then (`mixers/replay.py`); what is computed of each token alone is kept. The state
after the chunk is computed only where a chunk ends.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.core.chunking import CHUNK
from mixers import Chunk
from zoo.generation.graphs import DecodingGraphs, Graph, check_fits, overwrite
from zoo.generation.read import at_once
from zoo.lm.block import LayerState
from zoo.lm.model import LanguageModel
from zoo.lm.states import join_states, take_states


class ChunkDecoder:
    """A language model that reads one more token of each sequence with every call.

    Args:
        model: A language model of the zoo.
        prompts: B vectors of tokens, which may differ in length.
        state: The state before them, after a multiple of `CHUNK` tokens; None for the beginning of a document.
        graphs: The owner of the graphs that calls are captured as, with the state after the chunk and without it,
            unless the state grows; None to call the model directly.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Tensor],
        state: Any = None,
        *,
        graphs: DecodingGraphs | None = None,
    ) -> None:
        self.model = model
        state = model.init_state(len(prompts)) if state is None else state
        whole = [(len(prompt) - 1) // CHUNK * CHUNK for prompt in prompts]  # at least one token remains
        alike = len(set(whole)) == 1
        if alike:
            self._state: Any = self._read(torch.stack([prompt[: whole[0]] for prompt in prompts]), state)
        else:
            pairs = enumerate(zip(prompts, whole, strict=True))
            self._state = join_states(
                [self._read(prompt[None, :n], take_states(state, [r])) for r, (prompt, n) in pairs]
            )
        self._chunk = torch.zeros(len(prompts), CHUNK, dtype=torch.int64, device=prompts[0].device)
        self._counts = [len(prompt) - n for prompt, n in zip(prompts, whole, strict=True)]  # tokens in the chunk
        for row, (prompt, n) in enumerate(zip(prompts, whole, strict=True)):
            self._chunk[row, : self._counts[row]] = prompt[n:]
        self._last = torch.tensor(self._counts, device=self._chunk.device) - 1
        self._inputs: Any = None  # of all layers
        self._graphs = graphs
        self._graph: Graph | None = None
        self._eager = False  # whether a graph was refused
        self._after: Any = None

    def _read(self, prompts: Tensor, state: Any) -> Any:
        """The state after whole chunks of prompts [B,P]."""
        if not prompts.shape[1]:
            return state
        for piece in prompts.split(max(1, at_once(prompts.device) // len(prompts) // CHUNK) * CHUNK, dim=1):
            _, state = self.model.last_hidden(piece, state)
        return state

    @torch.no_grad()
    def __call__(self, tokens: Tensor | None = None) -> Tensor:
        """Tokens [B] int → logits [B,vocab] after them; None for those after the prompts."""
        if self._inputs is None:
            chunks = _in_chunks(self._state, None, self._last, max(self._counts) == CHUNK)
            hidden, after = self.model.last_hidden(self._chunk, chunks)
            self._after, self._inputs = _parts(after)
            del self._chunk
            if tokens is None:
                return self.model.logits(hidden[torch.arange(len(hidden), device=hidden.device), self._last])
        if tokens is None:
            raise ValueError("tokens: only the first call can do without them")
        if max(self._counts) == CHUNK:
            self._advance()
        self._last += 1
        self._counts = [count + 1 for count in self._counts]
        tokens, ends = tokens[:, None].to(torch.int64), max(self._counts) == CHUNK
        inputs = (tokens, self._last, self._state, self._inputs)
        if self._graphs is not None and self._graph is None and not self._eager:
            self._graph = self._graphs.take(self.model, inputs, self._constant, self._inside)
            self._eager = self._graph is None
            if self._graph is not None:
                self._tokens, self._last, self._state, self._inputs = self._graph.inputs
        if self._graph is not None:
            self._tokens.copy_(tokens)
        if not ends:
            return self._inside(*inputs) if self._graph is None else self._graph.others[0]()
        logits, self._after = self._compute(*inputs) if self._graph is None else self._graph.replay()
        return logits

    def close(self) -> None:
        """Return the graph to its owner."""
        if self._graph is not None and self._graphs is not None:
            self._graphs.put_back(self._graph)
        self._graph = None

    def _compute(self, tokens: Tensor, last: Tensor, state: Any, inputs: Any, ends: bool = True) -> tuple[Tensor, Any]:
        x, chunks = self.model.last_hidden(tokens, _in_chunks(state, inputs, last, ends))
        return self.model.logits(x[:, 0]), _parts(chunks)[0]

    def _inside(self, tokens: Tensor, last: Tensor, state: Any, inputs: Any) -> Tensor:
        return self._compute(tokens, last, state, inputs, False)[0]

    def _constant(self, tokens: Tensor, last: Tensor, state: Any, inputs: Any) -> tuple[Tensor, Any]:
        logits, after = self._compute(tokens, last, state, inputs)
        check_fits(state, after)
        return logits, after

    def _advance(self) -> None:
        """Move the sequences whose chunk is full to the next one."""
        full = [row for row, count in enumerate(self._counts) if count == CHUNK]
        state = self._after
        if len(full) < len(self._counts):
            rest = [row for row, count in enumerate(self._counts) if count < CHUNK]
            both = join_states([take_states(self._after, full), take_states(self._state, rest)])
            order = {row: place for place, row in enumerate([*full, *rest])}
            state = take_states(both, [order[row] for row in range(len(self._counts))])
        if self._graph is None:
            self._state = state
        else:
            overwrite(self._state, state)
        self._last[full] = -1
        self._counts = [count % CHUNK for count in self._counts]


def _in_chunks(states: Any, inputs: Any, last: Tensor, ends: bool) -> Any:
    """The state of each layer, or of both parts of a layer, as that of a chunk."""
    inputs, at = inputs or [None] * len(states), torch.arange(len(last), device=last.device) * CHUNK + last
    return tuple(
        LayerState(*(Chunk(part, kept and kept[i], at, ends) for i, part in enumerate(state)))
        if isinstance(state, LayerState)
        else Chunk(state, kept, at, ends)
        for state, kept in zip(states, inputs, strict=True)
    )


def _parts(chunks: Any) -> tuple[Any, Any]:
    """The states of chunks, and their inputs."""
    layers = [
        (LayerState(*(part.state for part in layer)), [part.inputs for part in layer])
        if isinstance(layer, LayerState)
        else (layer.state, layer.inputs)
        for layer in chunks
    ]
    states, inputs = zip(*layers, strict=True)
    return states, inputs
