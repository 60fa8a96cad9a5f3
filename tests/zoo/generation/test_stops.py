"""What ends a text: tokens of the tokenizer and the configs, strings, and logits of which nothing can be drawn."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zoo
from kernels import UserError
from tests.commands import Command
from tests.zoo.saved.public.public_folder import tensors, write
from tests.zoo.tiny import ByteTokenizer, TinyModel
from zoo.evaluation.loaded import LoadedModel, load_subject
from zoo.generation.generate import generate, generate_tokens, until
from zoo.train.callbacks.samples import Samples

from .test_generate import Scripted


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["a", "b", "c"], [], ["a", "b", "c"]),
        (["a", "b", "c", "d"], ["bc"], ["a"]),
        (["ab", "b", "d"], ["bc"], ["a", "b", "bd"]),
        (["aab", "b"], ["aabx", "ab"], ["a"]),
        (["hello ST", "O", "P now"], ["STOP", "OP"], ["hello "]),
        (["x", "ST"], ["STOP"], ["x", "ST"]),
        (["x\n\ny"], ["\n\n"], ["x"]),
        (["stop"], ["stop"], []),
        (["xaa", "b"], ["aab"], ["x"]),  # "a" begins it, too, but "aa" is longer
    ],
)
def test_text_ends_before_a_stop_string(pieces: list[str], stops: list[str], text: list[str]):
    assert [*until(iter(pieces), stops)] == text


def test_generation_ends_with_the_stop_string():
    model = Scripted([*b"one two three"])
    assert (
        "".join(generate(model, ByteTokenizer(), "x", max_new_tokens=13, temperature=0, stop=["o t", "!"])) == "one tw"
    )
    assert len(model.calls) == len("one two t")
    with pytest.raises(UserError, match="stop: '' is in every text"):
        generate(model, ByteTokenizer(), "x", stop=[""])


@pytest.mark.slow
def test_stop_strings_of_the_command_line(command: Command, finished: Path):
    arguments = ("generate", "--checkpoint", str(finished / "runs/done"), "--prompt=def", "--seed=0")

    def generated(*stop: str) -> str:
        return command(*arguments, "--max_new_tokens=60", *stop).out.removesuffix("\n").removeprefix("def")

    whole = generated()
    for stop in (["--stop=a"], ["--stop=\n"], ["--stop", "[/INST]"], ["--stop=1"], ["--stop=null"]):
        string = stop[-1].removeprefix("--stop=")
        expected = whole.partition(string)[0]
        assert generated(*stop) == expected, stop
        assert generated(f"--stop={json.dumps([string])}") == expected, stop
    assert generated("--stop=~", "--stop=a") == whole.partition("a")[0].partition("~")[0]
    assert "stop: ''" in command(*arguments, "--stop=").err


class Turns(ByteTokenizer):
    """A tokenizer with a second end, that of a turn."""

    stop_ids = (256, ord("%"))


def test_every_end_ends_a_text():
    script = [*b"ab%cd"]
    assert "".join(generate(Scripted(script), Turns(), "x", max_new_tokens=5, temperature=0)) == "ab"
    tokens = generate_tokens(Scripted(script), torch.tensor([[1]]), max_new_tokens=5, temperature=0, eos_id=(256, 37))
    assert torch.stack([*tokens], 1).tolist() == [[97, 98, 37]]
    subject = LoadedModel("m", Scripted(script), Turns(), 8, 64, False, {})
    assert subject.continuations([[1]], 5) == [[97, 98]]


def test_a_public_model_ends_where_its_configs_say(command: Command, desk: Path):
    write(desk / "theirs")
    arguments = ("generate", "--checkpoint=theirs", "--prompt=hello", "--temperature=0", "--max_new_tokens=12")
    ids = load_subject("theirs", "theirs", bf16=False, batch_tokens=64).continuations([[257]], 12)[0]
    (desk / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, ids[0]]}))
    assert command(*arguments).out == "hello\n"


class Broken(TinyModel):
    """Its logits break after so many calls."""

    def __init__(self, value: float, after: int) -> None:
        super().__init__()
        self.value, self.after = value, after

    def logits(self, x):
        self.after -= 1
        logits = super().logits(x)
        return logits * 0 + self.value if self.after < 0 else logits


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("eos_id", [None, 500])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_drawn_from_logits_that_are_not_finite(value: float, eos_id: int | None, temperature: float):
    tokens = generate_tokens(
        Broken(value, 3), torch.tensor([[1], [2]]), max_new_tokens=6, temperature=temperature, eos_id=eos_id
    )
    with pytest.raises(UserError, match=r"generation ended at token \d: the model's logits are NaN or infinite"):
        list(tokens)


def test_a_model_that_diverged_says_so(command: Command, desk: Path):
    weights = tensors()
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.nan
    write(desk / "theirs", weights)
    said = command("generate", "--checkpoint=theirs", "--prompt=hello").sentence()
    assert "generation ended at token 1: the model's logits are NaN" in said
    with pytest.raises(UserError, match="logits are NaN"):
        zoo.generate("theirs", "hello")


def test_samples_of_a_model_that_diverged(tmp_path: Path):
    class Context:
        def forward_context(self):
            return torch.no_grad()

    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), sanity_checking=False, precision_plugin=Context())
    trainer.global_step, trainer.is_global_zero, trainer.default_root_dir = 7, True, tmp_path
    module = nn.Module()
    module.model, module.tokenizer, module.print = Broken(float("nan"), 0), ByteTokenizer(), lambda text: None
    module.model.vocab_size = 257
    Samples(prompts=["\x01", "\x02"]).on_validation_end(trainer, module)
    text = (tmp_path / "samples.txt").read_text()
    assert text.count("── sample after 7 steps ──") == 2
    assert text.count("[generation ended at token 1: the model's logits are NaN or infinite") == 2
