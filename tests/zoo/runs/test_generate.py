"""`generate` at the command line."""

from pathlib import Path

import pytest
import torch

from tests.commands import Command

pytest_plugins = "tests.desk"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is only claimed is told by a complaint")
def test_the_gpu_is_used_where_there_is_one(command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ("generate", "--checkpoint", str(finished / "runs" / "done"), "--max_new_tokens=1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command(*ask).err.startswith("error: device: cuda cannot be used here")
    assert command(*ask, "--device=cpu").code == 0
