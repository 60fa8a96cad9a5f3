"""Tables of chunks, blocks and segments: each token is in one of each, in its own sequence."""

import pytest
import torch

from kernels.core.documents import documents
from kernels.gpu.layout import layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("segment", [128, 256, 1024])
@pytest.mark.parametrize("bounds", [[0, 300], [0, 0, 5, 300, 301, 640, 640], [0, 64, 128, 1000]])
def test_pieces_hold_all_tokens_of_their_sequence(bounds: list[int], segment: int):
    packed = documents(torch.tensor(bounds), bounds[-1])
    actual = layout(packed, 1, bounds[-1], 64, 128, segment, CPU)
    for table in (actual.chunks, actual.blocks, actual.segments):
        begin, tokens = table[:, 0].long(), table[:, 1].long()
        covered = torch.cat([torch.arange(b, b + n) for b, n in zip(begin.tolist(), tokens.tolist(), strict=True)])
        assert torch.equal(covered.sort().values, torch.arange(bounds[-1]))
    for (first, count), (start, stop) in zip(actual.sequences.tolist(), packed.spans, strict=True):
        mine = actual.segments[first : first + count]
        assert mine[0, 0] == start
        assert mine[:, 1].sum() == stop - start
        assert count == max(1, -(-(stop - start) // segment))
        assert (count > 1) == (first < actual.cut)  # those that are cut come first
        if stop > start:
            assert torch.equal(mine[:, 0], actual.chunks[mine[:, 2].long(), 0])
            assert torch.equal(mine[:, 0], actual.blocks[mine[:, 3].long(), 0])
    if not actual.cut:
        assert actual.sequences[:, 0].tolist() == list(range(len(packed.spans)))


def test_rows_are_documents_of_one_length():
    rows = layout(None, 3, 300, 64, 64, 128, CPU)
    packed = layout(documents(torch.tensor([0, 300, 600, 900]), 900), 1, 900, 64, 64, 128, CPU)
    for name in ("chunks", "blocks", "segments", "sequences"):
        assert torch.equal(getattr(rows, name), getattr(packed, name))


def test_tables_stay():
    tables = layout(None, 3, 1000, 64, 64, 512, CPU)
    for length in range(1, 400):
        layout(None, 1, length, 64, 64, 512, CPU)
    assert layout(None, 3, 1000, 64, 64, 512, CPU) is tables  # a CUDA graph may read them
