"""`generate` at the command line and in Python."""

from pathlib import Path

import pytest
import torch

import zoo
from kernels import UserError
from tests.commands import Command

pytest_plugins = "tests.desk"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is only claimed is told by a complaint")
def test_the_gpu_is_used_where_there_is_one(command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ("generate", "--checkpoint", str(finished / "runs" / "done"), "--max_new_tokens=1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command(*ask).err.startswith("error: device: cuda cannot be used here")
    assert command(*ask, "--device=cpu").code == 0


@pytest.mark.slow
def test_one_or_several_prompts_from_a_run_or_a_model(finished: Path, tmp_path: Path) -> None:
    run, options = finished / "runs" / "done", {"max_new_tokens": 6, "seed": 1}
    one = zoo.generate(run, "def ", **options)
    assert isinstance(one, str)
    assert one.startswith("def ")
    first, second = zoo.generate(run, ["def ", "def "], **options)
    assert first == one
    assert second == zoo.generate(run, "def ", max_new_tokens=6, seed=2)  # as if it were alone, with the next seed
    assert first != second
    model = zoo.load(run)
    assert zoo.generate(model, "def ", **options) == one
    assert model.generate(["def "], **options) == [one]
    assert isinstance(model.generate(max_new_tokens=1), str)
    parts: list[str] = []
    model.generate("def ", stream=parts.append, **options)
    assert "".join(parts) == one
    torch.save(model, tmp_path / "model.pt")  # also with its tokenizer
    assert torch.load(tmp_path / "model.pt", weights_only=False).generate("def ", **options) == one
    for prompt in (None, 5, ["a", 1]):
        with pytest.raises(UserError, match=r"^prompt: .* is neither text nor a list of texts$"):
            model.generate(prompt)


@pytest.mark.slow
def test_a_prompt_of_a_command_line_is_text_whatever_is_in_it(command: Command, finished: Path) -> None:
    for prompt in ("[1, 2]", "null", '{"a": 1}'):
        done = command("generate", f"--checkpoint={finished}/runs/done", f"--prompt={prompt}", "--max_new_tokens=1")
        assert done.out.startswith(prompt), done.err
