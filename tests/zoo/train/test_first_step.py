"""Kernels that are compiled before the first step."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mixers
from zoo.lm import LanguageModel, Uniform
from zoo.train.first_step import compile_ahead
from zoo.train.metrics import total_loss


def test_on_a_cpu_there_is_nothing_to_compile():
    def never() -> Tensor:
        raise AssertionError

    compile_ahead(torch.nn.Linear(2, 2), never)
    compile_ahead(torch.nn.Identity(), never)


@pytest.mark.gpu
def test_the_first_step_compiles_nothing_and_computes_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = LanguageModel(
        Uniform(mixers.GatedDeltaNet), vocab_size=50, hidden_size=160, num_heads=5, num_layers=2
    ).cuda()
    tokens = torch.randint(50, (2, 301), device="cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return total_loss(model, tokens[:, :-1], tokens[:, 1:])

    state = torch.cuda.get_rng_state()
    compile_ahead(model, loss)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: compiled.append(str(told["src"].name)))
    loss().backward()
    assert compiled == []
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    loss().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True) if p.grad is not None)
