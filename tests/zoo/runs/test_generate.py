"""`generate` at the command line and in Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from kernels import UserError
from tests.commands import Command
from zoo.data.text.corpus import Corpus


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


@pytest.mark.slow
def test_documents_of_a_model_are_a_corpus(command: Command, finished: Path, tmp_path: Path) -> None:
    """Whole batches are drawn, so the number of documents changes none of them."""
    run, options = finished / "runs" / "done", {"batch_size": 4, "seed": 1, "max_new_tokens": 20, "top_p": None}
    written = zoo.generate(run, count=6, output=tmp_path / "six.jsonl", **options)
    texts = [json.loads(line)["text"] for line in (tmp_path / "six.jsonl").read_text().splitlines()]
    assert (written.documents, len(set(texts))) == (6, 6)
    assert 6 < written.tokens <= 6 * 20
    zoo.generate(run, "def ", count=5, output=tmp_path / "five.jsonl", stop="e", **options)
    ended = [json.loads(line)["text"] for line in (tmp_path / "five.jsonl").read_text().splitlines()]
    assert all(text.startswith("def ") for text in ended)
    assert not any("e" in text[4:] for text in ended)
    again = ("--count=5", f"--output={tmp_path}/again.jsonl", "--batch_size=4", "--seed=1", "--max_new_tokens=20")
    done = command("generate", f"--checkpoint={run}", *again, "--top_p=null")
    assert f"{tmp_path}/again.jsonl: 5 documents, " in done.out
    assert (tmp_path / "again.jsonl").read_text().splitlines() == (tmp_path / "six.jsonl").read_text().splitlines()[:5]
    assert [*Corpus(str(tmp_path / "six.jsonl")).texts()] == texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 2}, "count, output: documents need both"),
        ({"output": "a.jsonl"}, "count, output: documents need both"),
        ({"count": 0, "output": "a.jsonl"}, "count is 0, but must be 1 or more"),
        ({"count": 2, "output": "a.jsonl", "batch_size": 0}, "batch_size is 0, but must be 1 or more"),
        ({"count": 2, "output": "there.jsonl/a.jsonl"}, "output: "),
        ({"count": 2, "output": "a.txt"}, r"output: a\.txt must end in \.jsonl"),
        ({"count": 2, "output": "there.jsonl"}, r"output: there\.jsonl exists already"),
        (
            {"count": 2, "output": "a.jsonl", "prompt": ["a"]},
            "output: documents are written by a saved model, after one",
        ),
    ],
)
def test_mistakes_about_documents(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("mine")
    with pytest.raises(UserError, match=message):
        zoo.generate("runs/none", **arguments)
    assert (tmp_path / "there.jsonl").read_text() == "mine"
