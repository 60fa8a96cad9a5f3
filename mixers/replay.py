"""A chunk whose tokens are computed again for each new one, so that all have the bits that they have in training.

A step of a recurrence rounds differently from a chunk of it. So decoding in deterministic mode keeps the state before
the newest chunk, and what is computed of each token alone, such as projections. No result depends on later tokens,
hence the rest of the chunk may hold anything.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kernels.core.chunking import CHUNK

Columns = tuple[int, int, tuple[int, ...]]  # number of a stream; its offset and strides in a row of the memory


class Chunk(NamedTuple):
    """In place of a state, where a layer is given only the newest token of each sequence.

    Args:
        state: Before the chunk, after a multiple of `CHUNK` tokens. A layer returns the state after the chunk here.
        inputs: What earlier calls have computed of each token alone, as `kept` returns it; None before the first call,
            in which the layer is given all tokens of the chunk.
        at: The place of the newest token of each sequence among all B · `CHUNK` tokens [B] int64.
    """

    state: Any
    inputs: dict[tuple[Columns, ...], Tensor] | None
    at: Tensor

    def kept(self, new: Any) -> tuple[Any, dict[tuple[Columns, ...], Tensor]]:
        """The streams of all tokens, and the memory that holds them for the next call.

        Args:
            new: A pytree of streams: tensors [B,T,…] of all tokens, T = `CHUNK`, or of the newest, T = 1. Others are
                taken as they come. Columns of one tensor stay columns of one tensor, since kernels may take them
                together.
        """
        if self.inputs is None:
            return new, _memory(tree_leaves(new), len(self.at))
        whole = list(tree_leaves(new))
        for streams, memory in self.inputs.items():
            # others are constants, which looked like a stream of all tokens
            new_ones = [stream for stream in streams if whole[stream[0]].shape[:2] == (len(self.at), 1)]
            row = _row([whole[number] for number, *_ in new_ones], new_ones, memory)
            if row is not None:
                memory.flatten(0, 1).index_copy_(0, self.at, row)
            for number, offset, strides in new_ones:
                part = whole[number]
                shape = (*memory.shape[:2], *part.shape[2:])
                view = memory.as_strided(shape, (*memory.stride()[:2], *strides), memory.storage_offset() + offset)
                if row is None:
                    view.flatten(0, 1).index_copy_(0, self.at, part[:, 0])
                whole[number] = view
        leaves = iter(whole)
        return tree_map(lambda _: next(leaves), new), self.inputs

    def newest(self, whole: Any) -> Any:
        """The streams of the newest tokens [B,1,…] of those of all [B,CHUNK,…], or of all steps of tokens."""
        B = len(self.at)

        def part(x: Any) -> Any:
            steps = x.shape[1] // CHUNK if isinstance(x, Tensor) and x.dim() > 1 else 0
            if not steps or not _is_stream(x, B, steps * CHUNK):
                return x
            at = self.at
            if steps > 1:
                at = (at[:, None] * steps + torch.arange(steps, device=at.device)).flatten()
            return x.flatten(0, 1).index_select(0, at).unflatten(0, (B, steps))

        return tree_map(part, whole)


def _is_stream(x: Any, rows: int, tokens: int) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.shape[:2] == (rows, tokens)


def _memory(leaves: list[Any], B: int) -> dict[tuple[Columns, ...], Tensor]:
    """The memory of streams, and which of its columns each of them is."""
    memories, streams = dict[tuple[int, ...], Tensor](), dict[tuple[int, ...], tuple[Columns, ...]]()
    for number, x in enumerate(leaves):
        if _is_stream(x, B, CHUNK):
            if (memory := _rows(x)) is not None:
                columns = number, int(x.storage_offset()), x.stride()[2:]
            else:
                memory = x.clone(memory_format=torch.contiguous_format)
                columns = number, 0, memory.stride()[2:]
            key = memory.data_ptr(), *memory.shape
            memories.setdefault(key, memory)
            streams[key] = (*streams.get(key, ()), columns)
    return {streams[key]: memory for key, memory in memories.items()}


def _rows(x: Tensor) -> Tensor | None:
    """The memory of a stream x [B,T,…] as [B,T,width], if it is some columns of that, else None."""
    B, T = x.shape[:2]
    width, rest = divmod(x.untyped_storage().nbytes(), x.itemsize * B * T)
    if rest or x.stride(0) != T * width or (T > 1 and x.stride(1) != width):
        return None
    return x.as_strided((B, T, width), (T * width, width, 1), 0)


def _row(parts: list[Tensor], streams: list[Columns], memory: Tensor) -> Tensor | None:
    """The newest rows [B,width] of a memory, if `parts` are its columns in one tensor [B,1,width], else None."""
    whole = _rows(parts[0]) if parts else None
    if whole is None or memory.dim() != 3 or whole.shape[2] != memory.shape[2]:
        return None
    places = [(x.untyped_storage().data_ptr(), int(x.storage_offset()), x.stride()[2:]) for x in parts]
    here = whole.untyped_storage().data_ptr()
    return whole[:, 0] if places == [(here, offset, strides) for _, offset, strides in streams] else None
