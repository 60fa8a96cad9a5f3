"""Steps of decoding to time, from a random state at a position."""

from typing import Any

import torch
from torch import Tensor

import kernels
from kernels.core.torch_internals import tree_leaves, tree_map
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.generation.decoder import Decoder
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.lm.states import growing


class OurSteps:
    """Steps after some tokens, each fed with the likeliest token of the last: eager, or on a GPU as CUDA graphs."""

    def __init__(
        self, model: LanguageModel, batch_size: int, position: int, graphs: DecodingGraphs | None = None
    ) -> None:
        self.position = position
        self.tokens = torch.randint(model.vocab_size, (batch_size,), device=next(model.parameters()).device)
        state = state_at(model, batch_size, position)
        self.state_bytes = sum(leaf.nbytes for leaf in tree_leaves(state))
        self.decoder: Decoder | ChunkDecoder
        if kernels.is_deterministic():
            self.decoder = ChunkDecoder(model, [*self.tokens[:, None]], state, graphs=graphs)
        else:
            self.decoder = Decoder(model, state, graphs)

    def __call__(self) -> None:
        self.tokens = self.decoder(self.tokens).argmax(-1)


def state_at(model: LanguageModel, batch_size: int, position: int) -> Any:
    """A random state with the size and the dtypes it has after `position` tokens."""
    state = _after_a_token(model, batch_size)
    more = iter(growing(model, state))

    def fill(leaf: Tensor) -> Tensor:
        grown = next(more)
        if not leaf.is_floating_point():
            return torch.full_like(leaf, position)
        size = (batch_size, position, *leaf.shape[2:]) if grown else leaf.shape
        return 0.1 * torch.randn(size, dtype=leaf.dtype, device=leaf.device)

    return tree_map(fill, state)


@torch.no_grad()
def _after_a_token(model: LanguageModel, batch_size: int) -> Any:
    token = torch.zeros(batch_size, 1, dtype=torch.int64, device=next(model.parameters()).device)
    return model(token, model.init_state(batch_size))[1]
