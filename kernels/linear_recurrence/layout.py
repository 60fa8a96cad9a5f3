"""Where the chunks of all sequences lie: small index tables that the Triton kernels read, made once per shape.

Sequences are the rows of a batch, or the documents packed into one row; tokens are counted through the whole batch.
Nothing here is a size that a kernel is compiled for.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..documents import documents

CHUNK = 64
BLOCK = 512  # tokens between two anchors of the gradients of the gates; segments are whole blocks


@dataclass(frozen=True)
class Layout:
    """Int32 tables.

    Attributes:
        chunks: First token, tokens.
        blocks: First token, tokens, first chunk.
        segments: First token, tokens, first chunk, first block, row of its first state.
        sequences: First segment, segments.
        segmented: Whether a segment is less than a sequence. If not, segments are the sequences, empty ones included.
    """

    chunks: Tensor
    blocks: Tensor
    segments: Tensor
    sequences: Tensor
    segmented: bool


def layout(
    batch_size: int, length: int, cu_seqlens: Tensor | None, segments: int, longest: int, device: torch.device
) -> Layout:
    """The tables of a batch, or of packed documents.

    Args:
        batch_size: Rows.
        length: Tokens per row.
        cu_seqlens: Boundaries of documents, if there are any.
        segments: How many segments would fill the device, over all sequences.
        longest: How many tokens a segment can have at most.
        device: Where the tables lie.
    """
    most = max(1, longest // BLOCK)
    if cu_seqlens is None:
        blocks = batch_size * -(-length // BLOCK)
        return _rows(batch_size, length, min(most, -(-blocks // segments)), device)
    found = documents(cu_seqlens, length)
    memo = found.__dict__.setdefault("_layouts", {})
    if (segments, most) not in memo:
        bounds = torch.tensor(found.bounds)
        blocks = int((-(-bounds.diff() // BLOCK)).sum())
        memo[segments, most] = _tables(bounds, min(most, -(-blocks // segments)), device)
    return memo[segments, most]


@lru_cache(maxsize=64)
def _rows(batch_size: int, length: int, blocks: int, device: torch.device) -> Layout:
    return _tables(torch.arange(batch_size + 1) * length, blocks, device)


def _tables(bounds: Tensor, blocks_per_segment: int, device: torch.device) -> Layout:
    begin, lengths = bounds[:-1], bounds.diff()

    def pieces(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of all sequences cut into pieces: owner, number in the sequence, first token, tokens."""
        counts = -(-lengths // size)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        number = torch.arange(len(owner)) - _before(counts)[owner]
        return owner, number, begin[owner] + number * size, (lengths[owner] - number * size).clamp(max=size)

    first_chunk, first_block = _before(-(-lengths // CHUNK)), _before(-(-lengths // BLOCK))
    _, _, start, tokens = pieces(CHUNK)
    chunks = [start, tokens]
    owner, number, start, tokens = pieces(BLOCK)
    blocks = [start, tokens, first_chunk[owner] + number * (BLOCK // CHUNK)]
    size = blocks_per_segment * BLOCK
    segmented = bool((lengths > size).any())
    if segmented:
        owner, number, start, tokens = pieces(size)
        chunk, block = number * (size // CHUNK), number * blocks_per_segment
        segments = [start, tokens, first_chunk[owner] + chunk, first_block[owner] + block, torch.arange(len(owner))]
        counts = -(-lengths // size)
        sequences = [_before(counts), counts]
    else:
        each = torch.arange(len(lengths))
        segments = [begin, lengths, first_chunk, first_block, each]
        sequences = [each, torch.ones_like(each)]

    def table(columns: list[Tensor]) -> Tensor:
        return torch.stack(columns, 1).int().to(device)

    return Layout(table(chunks), table(blocks), table(segments), table(sequences), segmented)


def _before(counts: Tensor) -> Tensor:
    """How many of them come before each."""
    return counts.cumsum(0) - counts
