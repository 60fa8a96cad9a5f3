"""Decoding in deterministic mode: every token has the logits, bit by bit, that training computes for it.

A step of a recurrence rounds differently from a chunk of it. So the state stays at the last multiple of `CHUNK` tokens,
and every call computes the chunk since then again, as the whole sequence would have it. No output depends on later
tokens, hence the rest of the chunk may hold anything.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernels.core.chunking import CHUNK
from zoo.generation.graphs import DecodingGraphs, Graph, check_fits, overwrite
from zoo.generation.read import at_once
from zoo.lm.model import LanguageModel
from zoo.lm.states import join_states, take_states


class ChunkDecoder:
    """A language model that reads one more token of each sequence with every call.

    Args:
        model: A language model of the zoo.
        prompts: B vectors of tokens, which may differ in length.
        state: The state before them, after a multiple of `CHUNK` tokens; None for the beginning of a document.
        graphs: The owner of the graph that a call is captured as, unless the state grows; None to call the model
            directly.
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
        self._graphs = graphs
        self._graph: Graph | None = None
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
        if tokens is not None:
            if max(self._counts) == CHUNK:
                self._advance()
            self._last += 1
            self._chunk.scatter_(1, self._last[:, None], tokens[:, None].to(torch.int64))
            self._counts = [count + 1 for count in self._counts]
        if self._graphs is not None and self._after is None:
            self._graph = self._graphs.take(self.model, (self._chunk, self._last, self._state), self._constant)
            if self._graph is not None:
                self._chunk, self._last, self._state = self._graph.inputs
        if self._graph is not None:
            logits, self._after = self._graph.replay()
        else:
            logits, self._after = self._compute(self._chunk, self._last, self._state)
        return logits

    def close(self) -> None:
        """Return the graph to its owner."""
        if self._graph is not None and self._graphs is not None:
            self._graphs.put_back(self._graph)
        self._graph = None

    def _compute(self, chunk: Tensor, last: Tensor, state: Any) -> tuple[Tensor, Any]:
        x, after = self.model.last_hidden(chunk, tree_map(torch.clone, state))
        return self.model.logits(x[torch.arange(len(x), device=x.device), last]), after

    def _constant(self, chunk: Tensor, last: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, after = self._compute(chunk, last, state)
        check_fits(state, after)
        return logits, after

    def _advance(self) -> None:
        """Move the sequences whose chunk is full to the next one."""
        full = [row for row, count in enumerate(self._counts) if count == CHUNK]
        if len(full) == len(self._counts) and self._graph is None:
            self._state = self._after
        else:
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
