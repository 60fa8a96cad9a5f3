"""The guard of `conftest.py` itself: what the interpreter would let pass fails."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@triton.jit
def copy(x, y, first, size, COUNT: tl.constexpr):
    at = first + tl.arange(0, COUNT)
    tl.store(y + at, tl.load(x + at, mask=at < size), mask=at < size)


@pytest.mark.parametrize(
    ("read", "written", "first", "passes"),
    [(8, 8, 0, True), (7, 8, 0, False), (8, 7, 0, False), (8, 8, -1, False), (5, 5, 4, False)],
)
def test_no_byte_outside_an_argument(read: int, written: int, first: int, passes: bool):
    memory = torch.zeros(64)
    x, y = memory[16:][:read], memory[40:][:written]
    if passes:
        copy[(1,)](x, y, first, 8, COUNT=8)
    else:
        with pytest.raises(Exception, match="outside its arguments"):
            copy[(1,)](x, y, first, 8, COUNT=8)
