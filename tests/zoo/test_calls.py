"""Mistakes of Python users, each with the sentence that answers it; and what `zoo` accepts in place of plain types."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mixers
import zoo
from kernels import UserError
from tests.commands import Command

GLA = ("gla.yaml", {"model": {"vocab_size": 16, "hidden_size": 32, "num_heads": 2, "num_layers": 1}})
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a key of Lightning's Trainer": (
        lambda: zoo.fit("gla.yaml", max_steps=5),
        'max_steps: not an argument of zoo.fit; pass the override "trainer.max_steps=5" after the config',
    ),
    "a key of the model": (
        lambda: zoo.fit("gla.yaml", tie_embeddings=True),
        'tie_embeddings: not an argument of zoo.fit; pass the override "model.tie_embeddings=true" after the config',
    ),
    "a key of the data": (
        lambda: zoo.fit("gla.yaml", path="notes/"),
        'path: not an argument of zoo.fit; pass the override "data.path=notes/" after the config',
    ),
    "a key of several groups": (
        lambda: zoo.fit("gla.yaml", every_n_steps=3),
        "every_n_steps: not an argument of zoo.fit (allowed: run, resume, overwrite, trust, dry_run, on, "
        'callbacks); keys of a config are overrides such as "trainer.max_steps=300", or mappings',
    ),
    "a key at the top": (
        lambda: zoo.fit("gla.yaml", seed_everything=3),
        'seed_everything: not an argument of zoo.fit; pass the override "seed_everything=3" after the config',
    ),
    "a group": (
        lambda: zoo.fit("gla.yaml", trainer={"max_steps": 3}),
        'trainer: not an argument of zoo.fit; pass the mapping {"trainer": …}',
    ),
    "a config by name": (
        lambda: zoo.fit(config="gla.yaml"),
        'config: not an argument of zoo.fit; pass configs without a name, as in zoo.fit("gla.yaml")',
    ),
    "an argument of another function": (
        lambda: zoo.load("runs/first", prompt="x"),
        "prompt: not an argument of zoo.load (allowed: path, device, trust)",
    ),
    "no argument": (lambda: zoo.load(), "load: missing a required argument: 'path' (path, device, trust)"),
    "configs in a list": (
        lambda: zoo.fit(["gla.yaml"]),
        "config: fit takes configs as separate arguments, as in zoo.fit(*configs)",
    ),
    "a number as a config": (lambda: zoo.fit(3), "config: 3 is not a name, a path, an override or a mapping"),
    "a model as a config": (
        lambda: zoo.fit(zoo.build(*GLA, device="meta")),
        "config: a LanguageModel is not a name, a path, an override or a mapping",
    ),
    "a function in a config": (
        lambda: zoo.build("gla.yaml", {"model": {"norm": len}}),
        "model.norm: <built-in function len> cannot be part of a config, which holds numbers, text, lists and classes",
    ),
    "nothing as a path": (lambda: zoo.load(None), "path: None is not a path"),
    "empty text as a path": (lambda: zoo.load(""), "path: '' is empty; write a value, or leave it out"),
    "empty text as one of several paths": (
        lambda: zoo.evaluate(["", "runs/b"], "passkey"),
        "checkpoint: '' is empty; write a value, or leave it out",
    ),
    "empty text as a config": (lambda: zoo.fit(""), "config: '' is empty; name a file, or one of configs/"),
    "a model as a path": (
        lambda: zoo.evaluate(zoo.build(*GLA, device="meta"), "passkey"),
        "checkpoint: evaluate reads a saved model; name its run, checkpoint or folder",
    ),
    "validate without a checkpoint": (
        lambda: zoo.validate("trainer.limit_val_batches=2"),
        "checkpoint: validate needs one, checkpoint='runs/NAME'",
    ),
    "validate with a config": (
        lambda: zoo.validate("gla.yaml"),
        "checkpoint: validate needs one, checkpoint='runs/NAME'",
    ),
    "validate without such a run": (lambda: zoo.validate("runs/no"), "checkpoint: there is nothing at runs/no"),
    "evaluate without tasks": (
        lambda: zoo.evaluate("runs/first"),
        "tasks: evaluate needs some, such as tasks='s_niah_1,passkey'; tasks='list' shows all of them",
    ),
    "resume and overwrite": (
        lambda: zoo.fit(resume="runs/first", overwrite=True),
        "overwrite: a run that is continued by resume cannot be replaced; give one of them",
    ),
    "an unknown device": (
        lambda: zoo.build(*GLA, device="gpu"),
        "device: gpu cannot be used here; names are cpu, cuda, cuda:0, mps, meta",
    ),
    "a prompt for a model without a tokenizer": (
        lambda: zoo.generate(zoo.build(*GLA), "a"),
        "prompt: this model has no tokenizer, which only those of zoo.load and zoo.fit have; "
        "zoo.generation.generate.generate_tokens continues tokens",
    ),
}


@pytest.mark.slow  # together: some of them import Lightning
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    call, sentence = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_gpu_that_is_missing_is_named():
    sentence = "^device: cuda cannot be used here, as PyTorch finds no CUDA device; leave it out, or use cpu$"
    with pytest.raises(UserError, match=sentence):
        zoo.build(*GLA, device="cuda")


def test_options_are_spelled_for_the_command_line_there(command: Command, desk: Path):
    assert command("validate").err == "error: checkpoint: validate needs one, --checkpoint runs/NAME\n"
    said = command("evaluate", "--checkpoint=x").err
    assert said == (
        "error: tasks: evaluate needs some, such as --tasks=s_niah_1,passkey; --tasks=list shows all of them\n"
    )


def test_configs_may_hold_numbers_of_other_libraries_tuples_paths_and_classes():
    values = {
        "num_layers": np.int64(2),
        "norm_eps": np.float32(0.5),
        "hidden_size": torch.tensor(64),
        "tie_embeddings": np.bool_(True),
        "norm": mixers.LayerNorm,
    }
    model = zoo.build(*GLA, {"model": values, "data": {"path": (Path("a"), "b")}}, device="meta")
    assert (model.num_layers, model.hidden_size, model.lm_head, model.norm.eps) == (2, 64, None, 0.5)


MODEL_MISTAKES = {
    "a row": (torch.tensor([1, 2]), "got torch.int64 of shape (2,)"),
    "a list": ([[1, 2]], "got a list"),
    "booleans": (torch.tensor([[True]]), "got torch.bool of shape (1, 1)"),
}


@pytest.mark.parametrize("mistake", MODEL_MISTAKES)
def test_tokens_of_another_shape_or_type_are_refused(mistake: str):
    model = zoo.build(*GLA)
    tokens, got = MODEL_MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        model(tokens)
    assert str(error.value) == (
        f"tokens: must be an integer tensor [batch, time], such as torch.tensor([[1, 2]]), {got}"
    )


def test_tokens_and_states_that_do_not_fit_are_refused():
    model = zoo.build(*GLA)
    tokens = torch.tensor([[1, 2]])
    for arguments, sentence in (
        ((torch.tensor([[3, 16]]),), "tokens: 3 to 16 are not all from 0 to 15"),
        ((torch.zeros(1, 0, dtype=torch.int64),), r"tokens: shape \(1, 0\) has no tokens; at least one is needed"),
        ((tokens, model.init_state(2)), "state: has 2 sequences, but the input has 1"),
        ((tokens, 5), "state: must be a state of init_state, or of an earlier call of this model"),
    ):
        with pytest.raises(UserError, match=f"^{sentence}$"):
            model(*arguments)
