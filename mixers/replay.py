"""A chunk whose tokens are computed again for each new one, so that all have the bits that they have in training.

A step of a recurrence rounds differently from a chunk of it. So decoding in deterministic mode keeps the state before
the newest chunk, and what is computed of each token alone, such as projections. No result depends on later tokens,
hence the rest of the chunk may hold anything.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernels.core.chunking import CHUNK


class Chunk(NamedTuple):
    """In place of a state, where a layer is given only the newest token of each sequence.

    Args:
        state: Before the chunk, after a multiple of `CHUNK` tokens. A layer returns the state after the chunk here.
        inputs: What earlier calls have computed of each token alone, as `kept` returns it; None before the first call,
            in which the layer is given all tokens of the chunk.
        last: The place of the newest token in the chunk of each sequence [B] int64.
    """

    state: Any
    inputs: dict[tuple[int, ...], Tensor] | None
    last: Tensor

    def kept(self, new: Any) -> tuple[Any, dict[tuple[int, ...], Tensor]]:
        """The streams of all tokens, and the memory that holds them for the next call.

        Args:
            new: A pytree of streams. Tensors [B,T,…] of more than two axes are those of the newest tokens, T = 1, or of
                all, T = `CHUNK`. What were columns of one tensor stay so, since kernels may take them together.
        """
        if self.inputs is None:
            return new, _memory(tree_leaves(new))
        rows, whole = torch.arange(len(self.last), device=self.last.device), list(tree_leaves(new))
        for numbers, memory in self.inputs.items():
            for number in numbers:
                part = whole[number]
                columns = memory.shape[2:] != part.shape[2:]  # of a row of the memory
                if number == numbers[0]:
                    memory[rows, self.last] = (_rows(part) if columns else part)[:, 0]
                if columns:
                    shape, strides = (*memory.shape[:2], *part.shape[2:]), (*memory.stride()[:2], *part.stride()[2:])
                    whole[number] = memory.as_strided(shape, strides, memory.storage_offset() + part.storage_offset())
                else:
                    whole[number] = memory
        streams = iter(whole)
        return tree_map(lambda _: next(streams), new), self.inputs

    def newest(self, whole: Any) -> Any:
        """The streams of the newest tokens [B,1,…] of those of all [B,CHUNK,…], or of all steps of tokens."""
        first = torch.arange(len(self.last), device=self.last.device)[:, None]

        def part(x: Any) -> Any:
            if not _of_tokens(x) or x.shape[1] % CHUNK:
                return x
            steps = x.shape[1] // CHUNK
            return x[first, self.last[:, None] * steps + torch.arange(steps, device=x.device)]

        return tree_map(part, whole)


def _of_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 2


def _rows(x: Tensor) -> Tensor:
    """The memory of x [B,T,…] as [B,T,width], if it is columns of that; else x."""
    B, T = x.shape[:2]
    width = x.untyped_storage().nbytes() // x.itemsize // (B * T)
    alike = (T == 1 or x.stride(1) == width) and (B == 1 or x.stride(0) == T * width)
    return x.as_strided((B, T, width), (T * width, width, 1), 0) if alike else x


def _memory(leaves: list[Any]) -> dict[tuple[int, ...], Tensor]:
    """The memory of streams, by the numbers of the streams that are its columns."""
    memories, numbers = dict[tuple[int, ...], Tensor](), dict[tuple[int, ...], tuple[int, ...]]()
    for number, x in enumerate(leaves):
        if _of_tokens(x):
            memory = _rows(x)
            key = memory.data_ptr(), *memory.shape
            memories.setdefault(key, memory)
            numbers[key] = (*numbers.get(key, ()), number)
    return {numbers[key]: memory for key, memory in memories.items()}
