"""What a process does before it trains on a processor."""

import ctypes
import subprocess
import sys

import pytest
import torch

from zoo.train.devices import fast_products, keep_memory

SIZE = 2**24
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
PROGRAM = f"""
import ctypes
from zoo.train.devices import keep_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in {FIELDS.split()}]

library = ctypes.CDLL(None)
library.mallinfo2.restype, library.malloc.restype, library.free.argtypes = Info, ctypes.c_void_p, [ctypes.c_void_p]
{{}}
library.free(library.malloc({SIZE}))
print(library.mallinfo2().arena)
"""


def held(setting: str) -> int:
    """Bytes that a process holds of the system after it has freed SIZE of them."""
    run = [sys.executable, "-c", PROGRAM.format(setting)]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_freed_memory_is_kept():
    before, after = held("pass"), held("assert keep_memory()")
    assert after - before > SIZE / 2


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_memory()


def test_fast_products_are_products_in_fp32(monkeypatch: pytest.MonkeyPatch):
    before, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    try:
        fast = fast_products()
        assert torch.get_float32_matmul_precision() == ("medium" if fast else before)
        assert torch.equal(torch.get_rng_state(), state)
        x, y = torch.randn(100, 300), torch.randn(300, 200)
        torch.testing.assert_close((x @ y).double(), x.double() @ y.double(), atol=1e-4, rtol=1e-5)
        # where products are rounded, nothing is changed
        torch.set_float32_matmul_precision(before)
        product = torch.Tensor.__matmul__
        rounded = {torch.float32: torch.bfloat16, torch.float64: torch.float64}
        monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(a.to(rounded[a.dtype]).to(a), b))
        assert not fast_products()
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(before)
