"""Positions of the chunks of all sequences: small index tables that the kernels read, built once per shape or packing.

Sequences are the rows of a batch, or the documents packed into one row; tokens are numbered across the whole batch.
No kernel is compiled for a size in these tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.documents import Documents, moved

CHUNK = 64  # tokens per chunk of the two matrix-state recurrences


@dataclass(frozen=True)
class Layout:
    """Int32 index tables.

    Attributes:
        chunks: First token, number of tokens.
        blocks: First token, number of tokens, first chunk.
        segments: First token, number of tokens, first chunk, first block, row of the first state. Segments of sequences
            that are cut come first.
        sequences: First segment, number of segments.
        ends: First segment of each sequence; last segment of each.
        cut: Number of segments that are shorter than their sequence. If it is 0, segments are the sequences in order,
            including empty ones, and their states are those of the sequences.

    Tables of bounded documents (`Documents.bounded`) have rows without tokens at their ends, so that their lengths, and
    `cut`, depend on the numbers of documents and tokens alone, and on whether sequences are cut. `cut` then counts
    further segments, of sequences that are not.
    """

    chunks: Tensor
    blocks: Tensor
    segments: Tensor
    sequences: Tensor
    ends: tuple[Tensor, Tensor]
    cut: int

    def tensors(self) -> Sequence[Tensor]:
        """All tables."""
        return [self.chunks, self.blocks, self.segments, self.sequences, *self.ends]


def most_chunks(batch: int, length: int, documents: int | None) -> int:
    """The number of chunks of rows, or the largest possible one of that many documents in a row."""
    return batch * -(-length // CHUNK) if documents is None else length // CHUNK + documents


def layout(
    packed: Documents | None,
    batch: int,
    length: int,
    chunk: int,
    block: int,
    segment: int,
    device: torch.device,
    steps: int = 1,
) -> Layout:
    """The tables of `batch` rows of `length` tokens, or of the documents that are packed into one row.

    Args:
        packed: The packed documents; None for rows.
        batch: Number of rows.
        length: Tokens per row.
        chunk: Tokens per chunk.
        block: Tokens per block, a multiple of the chunk.
        segment: Most tokens per segment, a multiple of the block.
        device: Device of the tables.
        steps: Rows per token; where it is not 1, the tokens of everything above and of the tables are such rows.
    """
    if packed is None:
        return _of_rows(batch, length, chunk, block, segment, device)
    return packed.tables(_of_documents, chunk, block, segment, device, steps)


@cache  # never evicted: a CUDA graph that reads the tables does not keep them alive
def _of_rows(batch: int, length: int, chunk: int, block: int, segment: int, device: torch.device) -> Layout:
    return _tables(torch.arange(batch + 1) * length, chunk, block, segment, device, False, False)


def _of_documents(packed: Documents, chunk: int, block: int, segment: int, device: torch.device, steps: int) -> Layout:
    cut = packed.reaches(segment // steps + 1)
    return _tables(torch.tensor(packed.bounds) * steps, chunk, block, segment, device, cut, packed.bounded)


def _tables(
    bounds: Tensor, chunk: int, block: int, segment: int, device: torch.device, is_cut: bool, bounded: bool
) -> Layout:
    """The tables of sequences with these bounds, of which one is cut, here or in another part of the row."""
    begin, lengths = bounds[:-1], bounds.diff()

    def pieces(counts: Tensor, first: Tensor, size: int, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All sequences, in this order, cut into pieces: owner, index in the sequence, first token, tokens."""
        owner = torch.repeat_interleave(order, counts[order])
        number = torch.arange(len(owner)) - first[owner]
        return owner, number, begin[owner] + number * size, (lengths[owner] - number * size).clamp(max=size)

    each = torch.arange(len(lengths))
    chunks_of, blocks_of = -(-lengths // chunk), -(-lengths // block)
    first_chunk, first_block = _before(chunks_of), _before(blocks_of)
    chunks = pieces(chunks_of, first_chunk, chunk, each)[2:]
    owner, number, *blocks = pieces(blocks_of, first_block, block, each)
    blocks.append(first_chunk[owner] + number * (block // chunk))
    segments_of = (-(-lengths // segment)).clamp(min=1)
    order = torch.argsort(segments_of == 1, stable=True)
    first = torch.empty_like(each).index_copy(0, order, _before(segments_of[order]))
    owner, number, *segments = pieces(segments_of, first, segment, order)
    segments += [first_chunk[owner] + number * (segment // chunk), first_block[owner] + number * (segment // block)]
    segments.append(torch.arange(len(owner)))
    cut = max(int(segments_of[segments_of > 1].sum()), is_cut)  # at least 1, to compute as the other parts
    documents, tokens = len(lengths), int(bounds[-1])
    most = None
    if bounded:
        most = documents + (tokens // segment if is_cut else 0)
        segments[-1] = torch.arange(most)  # a state for each row
        cut = min(most, 2 * tokens // segment) if is_cut else 0

    def table(*columns: Tensor, rows: int | None = None) -> Tensor:
        filled = [F.pad(x, (0, (len(x) if rows is None else rows) - len(x))) for x in columns]
        return moved(torch.stack(filled, 1).int(), device)

    return Layout(
        table(*chunks, rows=None if most is None else tokens // chunk + documents),
        table(*blocks, rows=None if most is None else tokens // block + documents),
        table(*segments, rows=most),
        table(first, segments_of),
        (moved(first.int(), device), moved((first + segments_of - 1).int(), device)),
        cut,
    )


def _before(counts: Tensor) -> Tensor:
    """The sum of all counts before each."""
    return counts.cumsum(0) - counts
