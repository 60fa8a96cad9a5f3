"""What a ZeRO strategy is told, before there are processes."""

from types import SimpleNamespace

import pytest
import torch

from kernels import UserError
from zoo.train.callbacks.checkpoints import Checkpoints

pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux")

from zoo.train.zero import Zero, ZeroPrecision


def test_sections_are_laid_over_ours():
    config = Zero(stage=3, config={"zero_optimization": {"overlap_comm": False}, "aio": {"queue_depth": 4}}).config
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["aio"] == {"queue_depth": 4}


def test_offload():
    zero = Zero(stage=3, offload_optimizer="cpu", offload_parameters="nvme", nvme_path="/fast").config
    assert zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert zero["zero_optimization"]["offload_param"]["nvme_path"] == "/fast"
    assert not zero["zero_force_ds_cpu_optimizer"]  # the optimiser is the one of `optim`


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage 3"),
        ({"stage": 1, "offload_optimizer": "nvme"}, "only stage 3 offloads to nvme"),
    ],
)
def test_contradictions(arguments, said):
    with pytest.raises(UserError, match=said):
        Zero(**arguments)


def test_precisions():
    for precision in ("bf16-true", "16-mixed", "16-true"):
        with pytest.raises(UserError, match=f"not {precision}"):
            ZeroPrecision(precision, "cpu")
    with ZeroPrecision("bf16-mixed", "cpu").forward_context():
        assert torch.is_autocast_enabled("cpu")
    with ZeroPrecision("32-true", "cpu").forward_context():
        assert not torch.is_autocast_enabled("cpu")
    batch = torch.zeros(2, 3)
    assert ZeroPrecision("bf16-mixed", "cpu").convert_input(batch) is batch


def test_checkpoints_are_not_written_in_the_background(tmp_path):
    trainer = SimpleNamespace(strategy=Zero(), default_root_dir=tmp_path, fast_dev_run=False, _signal_connector=None)
    with pytest.raises(UserError, match="in_background is true, but Zero writes its checkpoints itself"):
        Checkpoints(in_background=True).setup(trainer, None, "fit")
