"""Every config in configs/ can be stopped and continued: the run is the one that was never stopped, to the last bit.

`test_resume.py` stops processes at all kinds of moments, with one config; here every mixer has to keep up.
"""

import json
import signal
from pathlib import Path

import lightning as L
import pytest
import torch

import cli
from zoo import config as configs
from zoo.checkpoints.format import read_checkpoint

from .commands import sitting_at

STEPS, STOP = 8, 4
SETTING = f"""
model: {{hidden_size: 64, num_heads: 2}}
data: {{sequence_length: 24, batch_size: 2, max_characters: 200000, vocab_size: 512}}
optim: {{warmup_steps: 2}}
trainer:
  {{max_steps: {STEPS}, val_check_interval: {STEPS}, limit_val_batches: 1, log_every_n_steps: 1, accelerator: cpu}}
samples: {{prompts: []}}
"""
NAMES = sorted(path.name for path in configs.CONFIGS.glob("*.yaml"))
# Every run takes three layers with matrix, diagonal and cached states, parameters that layers share, and a recurrence
# without matrices. A mixer alone is saved and restored by its conformance tests.
EVERY_RUN = ("gdn_h2.yaml", "hgrn2.yaml", "mamba1.yaml")


class Interrupt(L.Callback):
    """Ctrl-C in the middle of step `STOP`."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == STOP - 1:
            signal.raise_signal(signal.SIGINT)


def depth(name: str) -> int:
    """Two layers, or as many as the stack has slots."""
    return max(2, len(vars(configs.read(name).model.stack.init_args)))


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of all training steps, in the order in which they were done."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.nightly) for name in NAMES]
)
def test_a_config_resumes_bitwise(name: str, tmp_path: Path, shared_cache: Path):
    (tmp_path / "setting.yaml").write_text(SETTING)
    (tmp_path / "stopping.yaml").write_text(f"trainer: {{callbacks: {{class_path: {__name__}.Interrupt}}}}\n")
    command = ["fit", "--config", name, "--config", "setting.yaml", f"--model.num_layers={depth(name)}"]
    with sitting_at(tmp_path, shared_cache):
        assert cli.run([*command, "--run", "whole"]) == 0
        with pytest.raises(KeyboardInterrupt):
            cli.run([*command, "--config", "stopping.yaml", "--run", "stopped"])
        whole, stopped = tmp_path / "runs" / "whole", tmp_path / "runs" / "stopped"
        assert len(losses(stopped)) == STOP, "the step in progress was finished, and no other begun"
        assert cli.run(["fit", "--resume", "stopped"]) == 0
    assert losses(stopped) == losses(whole)  # bitwise: JSON keeps every digit of an fp32 number
    assert [step for step, _ in losses(stopped)] == [*range(STEPS)], "no step was done twice"
    assert len({loss for _, loss in losses(whole)}) == STEPS
    actual, kept = weights(stopped), weights(whole)
    assert actual.keys() == kept.keys()
    assert [key for key in kept if not torch.equal(actual[key], kept[key])] == []
    results, wanted = (json.loads((run / "results.json").read_text()) for run in (stopped, whole))
    assert results["val_loss"] == wanted["val_loss"]
