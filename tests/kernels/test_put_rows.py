"""Rows written into several tensors at once."""

import pytest
import torch

import kernels
from kernels.put_rows import put_rows

from .comparisons import DEVICE


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("count", [0, 1, 8])  # more than a launch takes
def test_rows_are_written_to_their_places(backend: str, count: int):
    if backend == "triton":
        pytest.importorskip("triton")
    shapes = [(torch.bfloat16, 1030), (torch.float32, 2), (torch.float16, 64), (torch.bfloat16, 7)] * 2
    at, rows, memories, expected = torch.tensor([5, 0, 8], device=DEVICE), [], [], []
    for dtype, width in shapes[:count]:
        row, memory = (torch.randn(n, width, device=DEVICE).to(dtype) for n in (3, 9))
        wide = torch.cat([row, row], 1)[:, :width]  # rows apart
        rows, memories, expected = [*rows, wide], [*memories, memory.clone()], [*expected, memory]
        memory[at] = row
    with kernels.backend(backend):
        put_rows(rows, memories, at)
    assert all(map(torch.equal, memories, expected))
