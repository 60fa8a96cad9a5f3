"""AdamW whose learning rates are on the device: the update of PyTorch's, and its checkpoints."""

from typing import Any

import pytest
import torch
from torch import nn

from zoo.train.adamw import AdamW
from zoo.train.muon import Muon

RATE = 2**-6  # the same number in fp32


def trained(make: Any, steps: range = range(6), state: Any = None, weights: Any = None) -> tuple[nn.Module, Any]:
    """A model after some steps, of which the third is skipped."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    if weights is not None:
        model.load_state_dict(weights)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = make(groups)
    if state is not None:
        optimizer.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step % 4) / 4)
    for step in steps:
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if optimizer.defaults["fused"]:
            optimizer.found_inf = torch.tensor(float(step == 2))
        elif step == 2:
            model.zero_grad()
        optimizer.step()
        schedule.step()
    return model, optimizer


def ours(groups: list[dict[str, Any]]) -> AdamW:
    return AdamW(groups, RATE, (0.9, 0.95), 1e-8)


def of_pytorch(groups: list[dict[str, Any]], fused: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def test_it_updates_as_pytorch_does():
    (one, optimizer), (other, expected) = trained(ours), trained(of_pytorch)
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)
    groups = [{**group, "initial_lr": RATE} for group in expected.state_dict()["param_groups"]]
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize("fused", [True, False])
def test_it_continues_from_pytorchs_checkpoints(fused: bool):
    whole, _ = trained(lambda groups: of_pytorch(groups, fused))
    half, optimizer = trained(lambda groups: of_pytorch(groups, fused), range(4))
    rest, continued = trained(ours, range(4, 6), optimizer.state_dict(), half.state_dict())
    torch.testing.assert_close(rest.weight, whole.weight)
    assert all(group["fused"] for group in continued.param_groups)


def test_a_replay_takes_the_place_of_the_update():
    replays = []

    def replay() -> bool:
        replays.append(1)
        return len(replays) > 1

    def make(groups: list[dict[str, Any]]) -> AdamW:
        optimizer = ours(groups)
        optimizer.replay = replay
        return optimizer

    (model, _), (expected, _) = trained(make), trained(ours, range(1))
    assert len(replays) == 6
    assert torch.equal(model.weight, expected.weight)  # only the first update was run


def test_muon_reads_its_rates_from_the_device():
    def steps(on_gpu: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(size)) for size in ((6, 4), (4, 4), (3,))]
        matrices = {"params": weights[:2], "weight_decay": 0.1, "hidden": True, "matrices": [[2, 4], [4]]}
        optimizer = Muon([matrices, {"params": weights[2:], "hidden": False, "matrices": [[3]]}], RATE)
        assert not optimizer._on_gpu
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer._on_gpu = on_gpu
            optimizer.step()
        return weights

    for one, other in zip(steps(True), steps(False), strict=True):
        torch.testing.assert_close(one, other)
