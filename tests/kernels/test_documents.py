import pytest
import torch

import kernels


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_owner_and_positions(dtype: torch.dtype):
    found = kernels.documents(torch.tensor([0, 0, 3, 3, 5, 6, 6], dtype=dtype), 6)
    assert found.spans == [(0, 0), (0, 3), (3, 3), (3, 5), (5, 6), (6, 6)]
    assert found.owner.tolist() == [1, 1, 1, 3, 3, 4]
    assert found.positions.tolist() == [0, 1, 2, 0, 1, 0]


def test_values_are_read_once_per_tensor():
    bounds = torch.tensor([0, 2, 5])
    assert kernels.documents(bounds, 5) is kernels.documents(bounds, 5)
    assert kernels.documents(bounds.clone(), 5) is not kernels.documents(bounds, 5)


def test_a_remembered_tensor_is_still_checked():
    bounds = torch.tensor([0, 2, 5])
    kernels.documents(bounds, 5)
    with pytest.raises(ValueError, match=r"^cu_seqlens: ends at 5, .* 6 tokens"):
        kernels.documents(bounds, 6)
    with pytest.raises(ValueError, match=r"^cu_seqlens: .* 1 row"):
        kernels.documents(bounds, 5, 2)


def test_a_wrong_tensor_stays_wrong():
    # a memo must not turn the second attempt into a success
    bounds = torch.tensor([0, 4, 2, 5])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^cu_seqlens: .* never decrease"):
            kernels.documents(bounds, 5)
