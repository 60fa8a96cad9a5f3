"""Decoding in deterministic mode: every token has the logits, bit by bit, that training computes for it.

A step of a recurrence rounds differently from a chunk of it. So the state stays at the last multiple of `CHUNK` tokens,
and every call computes the chunk since then again, as the whole sequence would have it. No output depends on later
tokens, hence the rest of the chunk may hold anything.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernels.core.chunking import CHUNK
from zoo.generation.cuda_graph import capture, casts_not_cached
from zoo.generation.decoder import fits, overwrite
from zoo.generation.read import at_once
from zoo.lm.model import LanguageModel
from zoo.lm.states import join_states, take_states

log = logging.getLogger(__name__)


class ChunkDecoder:
    """A language model that reads one more token of each sequence with every call.

    On a GPU a call is one CUDA graph, unless the model's state grows.

    Args:
        model: A language model of the zoo.
        prompts: B vectors of tokens, which may differ in length.
        state: The state before them, after a multiple of `CHUNK` tokens; None for the beginning of a document.
        capture: Whether to capture; None to capture on a GPU.

    Attributes:
        refused: Why a call could not be captured, if it was tried in vain.
    """

    @torch.no_grad()
    def __init__(
        self, model: LanguageModel, prompts: Sequence[Tensor], state: Any = None, *, capture: bool | None = None
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
        self._replay: Callable[[], Any] | None = None
        self._capture = self._chunk.is_cuda if capture is None else capture
        self._after: Any = None
        self.refused: str | None = None

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
        if self._capture:
            self._prepare()
        logits, self._after = (self._replay or self._compute)()
        return logits

    def _compute(self) -> tuple[Tensor, Any]:
        x, after = self.model.last_hidden(self._chunk, tree_map(torch.clone, self._state))
        return self.model.logits(x[torch.arange(len(x), device=x.device), self._last]), after

    def _advance(self) -> None:
        """Move the sequences whose chunk is full to the next one."""
        full = [row for row, count in enumerate(self._counts) if count == CHUNK]
        if len(full) == len(self._counts) and self._replay is None:
            self._state = self._after
        else:
            rest = [row for row, count in enumerate(self._counts) if count < CHUNK]
            both = join_states([take_states(self._after, full), take_states(self._state, rest)])
            order = {row: place for place, row in enumerate([*full, *rest])}
            state = take_states(both, [order[row] for row in range(len(self._counts))])
            if self._replay is None:
                self._state = state
            else:
                overwrite(self._state, state)
        self._last[full] = -1
        self._counts = [count % CHUNK for count in self._counts]

    def _prepare(self) -> None:
        """Capture a call, on the first one."""
        self._capture = False
        with torch.inference_mode(False), torch.no_grad(), casts_not_cached():
            self._state = tree_map(torch.clone, self._state)

            def rehearse() -> None:
                if not fits(self._state, self._compute()[1]):
                    raise RuntimeError("the state grows")

            try:
                self._replay = capture(rehearse, self._compute, self._chunk.device)
            except RuntimeError as error:  # computed directly
                self.refused = " ".join(str(error).split())
                log.info("decoding without a CUDA graph: %s", self.refused)
