"""A chunk whose tokens are computed again for each new one, so that all have the bits that they have in training.

A step of a recurrence rounds differently from a chunk of it. So decoding in deterministic mode keeps the state before
the newest chunk, and what is computed of each token alone, such as projections. No result depends on later tokens,
hence the rest of the chunk may hold anything.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.core.chunking import CHUNK
from kernels.core.torch_internals import tree_leaves, tree_map
from kernels.put_rows import put_rows

Memory = dict[int, Tensor]  # the streams of all tokens [B,nT,…] by their number, contiguous


class Chunk(NamedTuple):
    """In place of a state, where a layer is given only the newest token of each sequence.

    Args:
        state: Before the chunk, after a multiple of `CHUNK` tokens. A layer returns the state after the chunk here; it
            may return None without `ends`.
        inputs: What earlier calls of the layer have computed, in tensors that it may overwrite; None before the first
            call, in which the layer is given all tokens of the chunk.
        at: The place of the newest token of each sequence among all B · `CHUNK` tokens [B] int64.
        ends: Whether the newest token of some sequence is the last of its chunk.
    """

    state: Any
    inputs: Any
    at: Tensor
    ends: bool = True

    def kept(self, new: Any, memory: Memory | None) -> tuple[Any, Memory]:
        """The streams of all tokens, and the memory that holds them for the next call.

        Args:
            new: A pytree of streams: tensors [B,nT,…] of n steps of each token, of all tokens without a memory, else of
                the newest. Others are taken as they come.
            memory: What the last call returned; None in the first one.
        """
        whole, B = list(tree_leaves(new)), len(self.at)
        if memory is None:
            streams = [i for i, x in enumerate(whole) if _steps(x, B)]
            memory = {i: whole[i].clone(memory_format=torch.contiguous_format) for i in streams}
        else:
            # others are constants, which looked like a stream of all tokens
            streams = [i for i, x in memory.items() if whole[i].shape[1] * CHUNK == x.shape[1]]
            rows = [memory[i].view(B * CHUNK, -1) for i in streams]
            put_rows([whole[i].reshape(B, -1) for i in streams], rows, self.at)
        for i in streams:
            whole[i] = memory[i]
        leaves = iter(whole)
        return tree_map(lambda _: next(leaves), new), memory

    def newest(self, whole: Any) -> Any:
        """The streams of the newest tokens [B,n,…] of those of all [B,n·CHUNK,…]."""

        def part(x: Any) -> Any:
            if not (steps := _steps(x, len(self.at))):
                return x
            rows = x.reshape(len(self.at) * CHUNK, steps, *x.shape[2:])
            return rows.index_select(0, self.at)

        return tree_map(part, whole)

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries [2B+1] of documents in one row, the tokens of a sequence up to its newest, and those after it."""
        first = torch.arange(len(self.at) + 1, device=self.at.device) * CHUNK
        return torch.cat([torch.stack([first[:-1], self.at + 1], 1).flatten(), first[-1:]])

    def packed(self, streams: Any) -> Any:
        """[B,CHUNK,…] → [1,B·CHUNK,…]."""
        return tree_map(lambda x: x.flatten(0, 1)[None] if _steps(x, len(self.at)) else x, streams)

    def unpacked(self, streams: Any) -> Any:
        """[1,n·B·CHUNK,…] → [B,n·CHUNK,…]."""
        B = len(self.at)
        return tree_map(lambda x: x.unflatten(1, (B, -1))[0] if _steps(x, 1, B * CHUNK) else x, streams)


def _steps(x: Any, rows: int, tokens: int = CHUNK) -> int:
    """The steps n of each token of a stream [rows,n·tokens,…]; 0 if x is not one."""
    if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or x.dim() < 2 or len(x) != rows:
        return 0
    return 0 if x.shape[1] % tokens else x.shape[1] // tokens
