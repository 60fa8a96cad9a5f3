"""Where the chunks of all sequences lie: small index tables that the Triton kernels read, made once per shape.

Sequences are the rows of a batch, or the documents packed into one row; tokens are counted through the whole batch.
Nothing here is a size that a kernel is compiled for.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..documents import documents
from ..launch import launch, multiprocessors

CHUNK = 64
BLOCK = 512  # tokens between two anchors of the gradients of the gates; segments are whole blocks
LARGEST = 1 << 31  # 32 bits count the elements of a segment
RESIDENT = 2  # programs of the sequential pass that run at once on one multiprocessor


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


def filling(heads: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many segments, over all sequences, fill the device."""
    size = int(max(K, V))  # a compiler may not know it yet
    slices = -(-V // launch("carry", size, dtype, device).block)
    return max(1, RESIDENT * multiprocessors(device) // (slices * heads))


def segment_length(q: Tensor, v: Tensor, subheads: int) -> int:
    """Tokens of the segments that the rows of a batch are cut into, known from the shapes alone."""
    B, T, _, K = q.shape
    heads, V = v.shape[2] * subheads, v.shape[3]
    most = LARGEST // (heads * max(K, V, CHUNK))
    wanted = -(-B * -(-T // BLOCK) // filling(heads, K, V, v.dtype, v.device))
    return BLOCK * max(1, min(most // BLOCK, wanted))


def kept_states(q: Tensor, v: Tensor, subheads: int) -> tuple[int, int, int, int]:
    """Shape [segments,H·E,K,V] of the states that segments start from; no segments where rows are not cut."""
    (B, T, _, K), (H, V) = q.shape, v.shape[2:]
    segment = segment_length(q, v, subheads)
    segments = B * -(-T // segment)
    return segments if segments > B else 0, H * subheads, K, V


@cache  # for good: a CUDA graph that read them would not keep them
def of_rows(batch_size: int, length: int, segment: int, device: torch.device) -> Layout:
    """The tables of a batch of rows of `length` tokens, cut into segments of so many."""
    return _tables(torch.arange(batch_size + 1) * length, segment // BLOCK, device)


def of_documents(cu_seqlens: Tensor, length: int, segments: int, longest: int, device: torch.device) -> Layout:
    """The tables of packed documents.

    Args:
        cu_seqlens: Their boundaries.
        length: Tokens of all of them.
        segments: How many segments would fill the device, over all documents.
        longest: How many tokens a segment can have at most.
        device: Where the tables lie.
    """
    found = documents(cu_seqlens, length)
    memo = found.__dict__.setdefault("_layouts", {})
    most = max(1, longest // BLOCK)
    if (segments, most) not in memo:
        bounds = torch.tensor(found.bounds)
        blocks = int((-(-bounds.diff() // BLOCK)).sum())
        memo[segments, most] = _tables(bounds, min(most, -(-blocks // segments)), device)
    return memo[segments, most]


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
