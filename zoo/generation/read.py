"""Reading prompts into states, in pieces of bounded size: memory does not grow with the length of the prompts."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.lm.model import LanguageModel
from zoo.lm.states import join_states

# tokens in one call of the model, over all sequences: enough to keep the device busy
AT_ONCE = {"cpu": 2048, "cuda": 16_384}


def at_once(device: torch.device) -> int:
    """Return the number of tokens to read in one call of a model on a device."""
    return AT_ONCE.get(device.type, AT_ONCE["cpu"])


@torch.no_grad()
def read(model: LanguageModel, prompts: Sequence[Tensor]) -> tuple[Tensor, tuple[object, ...]]:
    """Read prompts, B vectors [P_i ≥ 1], each from its beginning.

    Prompts of the same length are read as a batch, those of different lengths packed into one row if they fit, and
    otherwise one after another. The head sees the last token of each prompt only.

    Returns:
        Logits after each prompt [B,vocab_size], and the state of all sequences.
    """
    lengths = [len(prompt) for prompt in prompts]
    if len(set(lengths)) == 1:
        return _together(model, torch.stack(list(prompts)))
    if sum(lengths) <= at_once(prompts[0].device):
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device=prompts[0].device)
        x, state = model.last_hidden(torch.cat(list(prompts))[None], model.init_state(len(prompts)), cu_seqlens=ends)
        assert state is not None
        return model.logits(x[0, ends[1:] - 1]), state
    logits, states = zip(*(_together(model, prompt[None]) for prompt in prompts), strict=True)
    return torch.cat(logits), join_states(states)


def _together(model: LanguageModel, prompts: Tensor) -> tuple[Tensor, tuple[object, ...]]:
    """Logits after prompts [B,P], and the state."""
    state = model.init_state(len(prompts))
    for piece in prompts.split(max(1, at_once(prompts.device) // len(prompts)), dim=1):
        x, state = model.last_hidden(piece, state)  # type: ignore[assignment]
        x = x[:, -1].clone()  # so that only this much of it is kept during the next piece
    return model.logits(x), state
