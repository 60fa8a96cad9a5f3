"""An exported model is the model, in files that need no pickle."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from kernels import UserError
from tests.commands import Command
from zoo.saved.export import export


@pytest.mark.slow
def test_an_exported_run_is_the_run(command: Command, finished: Path, desk: Path):
    run = finished / "runs" / "done"
    done = command("export", "--checkpoint", str(run), "--output", "exported").ok()
    assert done.out.splitlines() == ["exported", 'next: python cli.py generate --checkpoint exported --prompt "def "']
    assert sorted(path.name for path in (desk / "exported").iterdir()) == [
        "config.yaml",
        "hashes.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    expected = zoo.load(run).state_dict()
    for actual in (load_file(desk / "exported" / "model.safetensors"), zoo.load(desk / "exported").state_dict()):
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert zoo.load_tokenizer(desk / "exported").to_json() == zoo.load_tokenizer(run).to_json()


def test_a_folder_that_cannot_be_written(finished: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        export(finished / "runs" / "done", tmp_path / "file" / "folder")
