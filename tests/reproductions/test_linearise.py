"""The script that turns a published Transformer into hybrids: its teacher, students, stages and rows."""

import argparse
from pathlib import Path

import pytest
import torch

import zoo
from reproductions import linearise
from tests.zoo.saved.grow.subjects import exported
from zoo.config.overlays import load_config
from zoo.config.parser import read as parsed


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    """A command line of the script, with a teacher of safetensors in two parts."""
    exported(tmp_path / "ours", "transformer")
    public = zoo.convert(tmp_path / "ours", tmp_path / "public", to="huggingface")
    whole = public / "model.safetensors"
    content, parts = whole.read_bytes(), [whole.with_name(f"{whole.name}.{number}") for number in (0, 1)]
    for part, half in zip(parts, (content[:1000], content[1000:]), strict=True):
        part.write_bytes(half)
    whole.unlink()
    folder = tmp_path / "work"
    folder.mkdir()
    return argparse.Namespace(
        teacher=parts, folder=folder, tokens=1e6, batch=8, length=125, overrides=["a=1"], delete=True
    )


def test_a_teacher_in_parts_is_joined_and_converted_once(args: argparse.Namespace, tmp_path: Path):
    teacher = linearise.teacher_of(args)
    before, after = (zoo.load(folder).state_dict() for folder in (tmp_path / "ours", teacher))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    written = (teacher / "config.yaml").stat().st_mtime_ns
    assert linearise.teacher_of(args) == teacher
    assert (teacher / "config.yaml").stat().st_mtime_ns == written
    assert linearise.teacher_of(argparse.Namespace(teacher=[teacher])) == teacher


def test_stages_divide_the_tokens(args: argparse.Namespace):
    configs = {Path(file).stem: load_config(file) for file in linearise.stages(args)}
    steps = {name: config["trainer"]["max_steps"] for name, config in configs.items()}
    assert steps == {"distil_layers": 200, "distil_logits": 700, "next_token": 100}
    assert configs["next_token"]["data"] == {"sequence_length": 250, "batch_size": 4}


def test_eleven_students_and_layers_without_positions(args: argparse.Namespace, tmp_path: Path):
    assert len(linearise.STUDENTS) == 11
    student = zoo.linearise(linearise.teacher_of(args), tmp_path / "student", "RetNet", keep="every:4").folder
    for overrides in ([], [linearise.NO_POSITIONS]):
        kept = parsed(str(student / "config.yaml"), *overrides).model.stack.init_args.mixers["A"]
        assert kept.class_path.endswith("SoftmaxAttention")
        assert (kept.init_args.qk.map is None) == bool(overrides)
