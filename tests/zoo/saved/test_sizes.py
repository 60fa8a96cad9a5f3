from typing import Any

import pytest
import torch

from kernels import UserError
from zoo.saved.trust import check_sizes

WEIGHTS = {"embeddings.weight": torch.empty(100, 8), "layers.0.norm.weight": torch.empty(8)}  # 808 numbers


@pytest.mark.parametrize(
    "model",
    [
        {"num_layers": 3},
        {"hidden_size": 809},
        {"hidden_size": float("inf")},
        {"stack": {"class_path": "mixers.GLA", "init_args": {"mixer": {"init_args": {"head_dim": 10**9}}}}},
        {"stack": {"init_args": {"pattern": [{"init_args": {"window_size": 1 << 30}}]}}},
    ],
)
def test_too_large(model: dict[str, Any]):
    with pytest.raises(UserError, match=r"file does not fit the model: model\..* is too large for its weights"):
        check_sizes(model, WEIGHTS, "file")


def test_large_enough():
    model = {"num_layers": 2, "hidden_size": 8, "tie_embeddings": True, "nominal_size": 4e8, "norm_eps": 1e-6}
    rotary = {"class_path": "mixers.Rotary", "init_args": {"base": 1_000_000}}
    check_sizes({**model, "stack": {"init_args": {"map": rotary, "window_size": 4096}}}, WEIGHTS, "file")
