"""`convert --dry-run`: what each key and tensor becomes, and nothing on disk."""

import json
import re
from pathlib import Path

import pytest
import torch

import zoo
from tests.commands import Command
from tests.zoo.saved.gguf.models import exported
from tests.zoo.saved.public.public_folder import write


def planned(command: Command, *arguments: str) -> str:
    before = sorted(Path().rglob("*"))
    done = command("convert", *arguments, "--output", "new", "--dry-run").ok()
    assert sorted(Path().rglob("*")) == before
    assert done.out.splitlines()[-1] == "nothing was written"
    return done.out


def row(text: str, *cells: str) -> bool:
    """Return whether a line of a table has these cells."""
    return re.search(r"^ +" + r" {2,}".join(map(re.escape, cells)) + r" *$", text, re.MULTILINE) is not None


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_public_folder(command: Command, desk: Path, wide: None):
    write(desk / "theirs", use_short_conv=False, share_conv_kernel=True, notes=[], swa={"size": 4})
    plan = planned(command, "--checkpoint", "theirs", "--ignore=swa")
    assert row(plan, "hidden_size", "32", "read")
    assert row(plan, "share_conv_kernel", "true", "checked")
    assert row(plan, "transformers_version", '"4.40.0"', "without effect")
    assert row(plan, "notes", "[]", "off")
    assert row(plan, "swa", '{"size": 4}', "ignored")
    assert row(plan, "model.embeddings.weight", "embeddings.weight", "260 × 32", "float32", "1")
    assert row(plan, "model.layers.*.attn.q_proj.weight", "layers.*.mixer.in_proj.q.weight", "16 × 32", "float32", "2")
    assert "class_path: GLA" in plan


def test_a_gguf_file_and_back(command: Command, desk: Path, wide: None):
    pytest.importorskip("gguf")
    zoo.convert(exported(desk / "ours", "llama", dtype=torch.bfloat16), desk / "m.gguf", to="gguf")
    plan = planned(command, "--checkpoint", "m.gguf")
    assert row(plan, "blk.*.attn_q.weight", "layers.*.mixer.in_proj.q.weight", "64 × 64", "bfloat16", "3")
    plan = planned(command, "--checkpoint", "ours", "--to=gguf", "--quantize=q8_0")
    assert row(plan, "layers.*.mixer.in_proj.q.weight", "blk.*.attn_q.weight", "64 × 64", "q8_0", "3")
    assert row(plan, "norm.weight", "output_norm.weight", "64", "f32", "1")
    before = (desk / "m.gguf").read_bytes()
    done = command("convert", "--checkpoint", "ours", "--to=gguf", "--output=m.gguf", "--overwrite", "--dry-run")
    assert done.out.splitlines()[-1] == "nothing was written"
    assert (desk / "m.gguf").read_bytes() == before


def test_a_model_of_ours(command: Command, desk: Path, wide: None):
    exported(desk / "ours", "mamba2")
    plan = planned(command, "--checkpoint", "ours", "--to=huggingface")
    fused = " + ".join(f"layers.*.mixer.{s}_features.bias" for s in "vkq")
    assert row(plan, fused, "backbone.layers.*.mixer.conv1d.bias", "256", "float32", "3")
    assert json.loads(plan[plan.index("{\n") : plan.rindex("}") + 1])["model_type"] == "mamba2"


def test_what_is_refused_is_refused_here(command: Command, desk: Path):
    write(desk / "theirs", window=7)
    done = command("convert", "--checkpoint", "theirs", "--output", "new", "--dry-run").refused()
    assert "window is 7, which fla_gla does not know" in done.err
