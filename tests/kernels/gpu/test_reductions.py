import pytest
import torch

pytest.importorskip("triton")
from kernels.gpu import reductions as sums

from ..places import PLACES


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "R", "C"), [(1, 1, 1), (3, 5, 7), (512, 1, 9), (1100, 4, 6)])
def test_parts_are_added_up(n: int, R: int, C: int, dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch):
    allocate = sums.new
    monkeypatch.setattr(sums, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan))
    parts = torch.randn(n, R, C, device=where)
    actual = sums.add_parts(parts, dtype)
    expected = parts.double().sum(0).T
    assert (actual.shape, actual.dtype) == ((C, R), dtype)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-4)
    assert torch.equal(actual, sums.add_parts(parts, dtype))
