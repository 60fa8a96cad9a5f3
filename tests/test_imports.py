"""What takes seconds to import is not imported by commands and functions that answer without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo

ROOT = Path(__file__).parents[1]
# Lightning imports torchmetrics, which imports transformers and SciPy; torch._dynamo is PyTorch's compiler
HEAVY = (
    "lightning",
    "torchmetrics",
    "transformers",
    "scipy",
    "matplotlib",
    "lm_eval",
    "torch._dynamo",
    "sympy",
    "triton",
)
# one interpreter for all of them, in this order, since none may import anything heavy
LIGHT = f"""
import contextlib, io, sys

def light(what):
    found = [name for name in {HEAVY} if name in sys.modules]
    assert not found, f"{{what}} imports {{', '.join(found)}}"
    print("light:", what)

import cli
assert cli.run(["--version"]) == 0
assert "torch" not in sys.modules
light("--version")
import zoo
light("import zoo")
zoo.build("gdn_h2.yaml", "model.vocab_size=1024", device="meta")
light("zoo.build on the meta device")
zoo.build("gla.yaml", "model.vocab_size=16", "model.hidden_size=32", "model.num_heads=1", "model.num_layers=1")
light("zoo.build")
with contextlib.redirect_stdout(io.StringIO()):
    assert cli.run(["mixers"]) == 0
    assert cli.run(["mixers", "GatedDeltaNet"]) == 0
light("mixers")
for verb in ("fit", "validate", "test", "predict"):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            cli.run([verb, "--help"])
        except SystemExit as left:
            assert left.code == 0
    assert f"options of {{verb}}" in said.getvalue() and "Lightning's Trainer" in said.getvalue()
    light(f"{{verb}} --help")
try:
    cli.run(["fti"])
except zoo.UserError as error:
    print(error)
light("a wrong verb")
try:
    zoo.build("gla.yaml", "smaples.every=3")
except zoo.UserError as error:
    print(error)
light("a wrong key")
gdn = ["fit", "--config", "gdn_h2.yaml"]
mistakes = [["--model.num_layer=3"], ["--optim.learnin_rate=1"], ["--num_layers=3"]]
mistakes += [["--config", "gdn_h3.yaml"]]
for mistake in mistakes:
    try:
        cli.run([*gdn, *mistake])
        raise AssertionError(mistake)
    except zoo.UserError as error:
        assert "did you mean" in str(error), error
    light(f"fit {{mistake}}")
with contextlib.redirect_stdout(io.StringIO()):
    cli.run(["evaluate", "--tasks=list"])
light("evaluate --tasks=list")
for name in zoo.__all__:
    assert getattr(zoo, name).__name__ == name, name
assert "lightning" in sys.modules
"""


@pytest.mark.slow
def test_what_needs_no_lightning_does_not_import_it():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("light: ")]
    assert said[:2] == [f"token-mixer-zoo {zoo.__version__} ({ROOT})", f"torch {torch.__version__}"]
    assert said[2].startswith("triton ")
    assert said[3].startswith("'fti' is not a verb; did you mean 'fit'? (verbs: fit, ")
    assert said[4].startswith("smaples.every: unknown key; did you mean 'samples'?")
    assert len(done.stdout.splitlines()) == len(said) + 16


def processor_seconds(*arguments: str) -> float:
    """The least processor time of three processes of Python, which is not that of other work on the machine."""
    measured = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        after = os.times()
        measured.append(sum(after[2:4]) - sum(before[2:4]))
    return min(measured)


@pytest.mark.nightly
def test_start_up_takes_little_longer_than_to_import_pytorch():
    """1.3 and 1.4 times as long when this was written; Lightning makes it four times."""
    pytorch = processor_seconds("-c", "import torch")
    assert processor_seconds("-c", "import zoo") < 1.8 * pytorch
    assert processor_seconds("cli.py", "mixers") < 2.2 * pytorch
