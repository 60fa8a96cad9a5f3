"""The dtype of each tensor through every layout, and through training in bf16-true."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from tests.commands import Command
from tests.zoo.saved.gguf import models
from tests.zoo.saved.gguf.models import CASES, exported

DELTA = models.uniform(
    "GatedDeltaNet",
    **dict(num_heads=4, head_dim=16, value_dim=32, qk={**models.CONVOLVED, "norm": "l2"}, v=models.CONVOLVED),
)


def types(folder: str | Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layouts"),
    [("qwen3.5", ["huggingface", "gguf"]), ("mamba2", ["huggingface", "fla", "gguf"]), ("a delta net", ["fla"])],
)
def test_they_survive(case: str, layouts: list[str], command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CASES, "a delta net", ("", DELTA, {"norm_eps": 1e-5}))
    mixed = types(exported(desk / "ours", case, dtype=torch.bfloat16))
    assert set(mixed.values()) == {torch.float32, torch.bfloat16}
    for name, dtype in mixed.items():
        assert (dtype == torch.float32) == any(part in name for part in ("norm", "A_log", "dt_bias", ".D")), name
    (desk / "data.yaml").write_text(
        "data: {sequence_length: 32, batch_size: 2, max_characters: 20000}\n"
        "trainer: {max_steps: 1, limit_val_batches: 1, accelerator: cpu, precision: bf16-true}\n"
    )
    start = ("--optim.initial_weights=ours", "--data.tokenizer=ours", "--run=trained")
    command("fit", "--config", "ours/config.yaml", "--config", "data.yaml", *start).ok()
    for checkpoint in ("ours", "runs/trained"):
        for layout in layouts:
            theirs = desk / f"{Path(checkpoint).name} {layout}{'.gguf' if layout == 'gguf' else ''}"
            zoo.convert(checkpoint, theirs, to=layout)
            assert types(zoo.convert(theirs, desk / f"{theirs.name} back")) == mixed
