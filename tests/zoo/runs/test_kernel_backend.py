"""`backend`: the implementations of a training run, and nothing after it."""

from pathlib import Path

import lightning as L
import pytest
import torch

import kernels
import zoo

SMALL = (
    "gla.yaml",
    "tiny.yaml",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=1",
    "samples.prompts=[]",
)


def ran(*overrides: str) -> dict[str, set[str]]:
    with kernels.implementations() as found:
        zoo.fit(*SMALL, *overrides)
    return found


def here() -> str:
    x = torch.ones(1, 2, 1, 4)
    with kernels.implementations() as found:
        kernels.linear_recurrence(x, x, x)
    (name,) = found["linear_recurrence"]
    return name


@pytest.mark.slow
def test_a_run_has_its_backend(desk: Path):
    assert ran("backend=reference")["linear_recurrence"] == {"reference"}
    assert here() == "torch"
    assert ran()["linear_recurrence"] == {"torch"}


@pytest.mark.slow
def test_a_run_has_its_mode(desk: Path):
    seen = []

    class Noted(L.Callback):
        def on_train_start(self, *_):
            seen.append(kernels.is_deterministic())

    zoo.fit(*SMALL, "deterministic_kernels=true", "trainer.max_steps=1", callbacks=[Noted()])
    assert seen == [True]
    assert not kernels.is_deterministic()


def test_compiled_code_has_no_such_mode(desk: Path):
    with pytest.raises(kernels.UserError, match=r"^deterministic_kernels: true does not cover compiled code"):
        zoo.fit(*SMALL, "deterministic_kernels=true", "compile=true")


def test_a_backend_that_cannot_run_is_a_sentence_and_is_left(desk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as the tests of kernels set it
    with pytest.raises(kernels.UserError, match=r"^backend: .* cannot run on 'triton', which needs a GPU"):
        ran("backend=triton")
    assert here() == "torch"
