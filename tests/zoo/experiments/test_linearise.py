"""The stages of `linearise`: one command from a teacher to a trained student, which continues where it was stopped."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cli
import zoo
from tests.commands import FIT, Command, sitting_at, start
from tests.hub_server import Hub

# Stops its own process in the second step of the run STOP_IN: at once, or when somebody else does it.
STOPPER = """
import os, signal, time
from pathlib import Path
import lightning as L

class Stop(L.Callback):
    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step != 1 or os.environ.get("STOP_IN") != Path(trainer.default_root_dir).name:
            return
        if "STOP_WITH" in os.environ:
            os.kill(os.getpid(), int(os.environ["STOP_WITH"]))
        Path("reached").touch()
        deadline = time.monotonic() + 60
        while Path("reached").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
"""
STAGES = "--stages=[train/distil_layers.yaml,train/distil_logits.yaml,longer.yaml]"
SHARED = (
    "trainer: {max_steps: 3, val_check_interval: 3, callbacks: {class_path: stopper.Stop}}\noptim: {warmup_steps: 1}\n"
)
LONGER = "teacher: {checkpoint: null}\ndata: {sequence_length: 64}\noptim: {learning_rate: 1.0e-4}\n"
LOSSES = ["teacher", "untrained", "distil_layers", "distil_logits", "longer"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """A trained transformer; only to be read."""
    folder = tmp_path_factory.mktemp("taught")
    with sitting_at(folder, shared_cache):
        short = ("--config", "tiny.yaml", "--trainer.max_steps=2")
        assert cli.run(["fit", "--config", "transformer.yaml", *short, "--run", "teacher"]) == 0
    return folder / "runs" / "teacher"


@pytest.fixture
def staged(desk: Path, taught: Path, forked_runs: None) -> list[str]:
    """The command, without its stages and its output."""
    for name, text in {"stopper.py": STOPPER, "shared.yaml": SHARED, "longer.yaml": LONGER}.items():
        (desk / name).write_text(text)
    options = ("--mixer=GatedDeltaNet", "--keep=every:3", "--tokens=64", "--config", "shared.yaml")
    return ["linearise", f"--checkpoint={taught}", *options]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_stopped_in_each_stage_and_before_the_first(
    command: Command, desk: Path, shared_cache: Path, staged: list[str]
):
    whole = command(*staged, STAGES, "--output=whole").ok()
    rows = [line.split() for line in whole.out.splitlines() if line.split()[:1] and line.split()[0] in LOSSES]
    assert [row[0] for row in rows] == LOSSES

    def begun(**environment: str) -> "subprocess.Popen[str]":
        return start(
            desk, shared_cache, *staged, STAGES, "--output=student", OMP_NUM_THREADS="1", ZOO_RUN="", **environment
        )

    def stopped(reached: Callable[[], bool], number: signal.Signals, **environment: str) -> int:
        process = begun(**environment)
        deadline = time.monotonic() + 120
        while not reached():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        (desk / "reached").unlink(missing_ok=True)
        process.communicate(timeout=120)
        return process.returncode

    assert stopped((desk / "student").is_dir, signal.SIGINT) == 130
    assert not (desk / "student" / "distil_layers").exists()
    (desk / "student" / ".student.killed").mkdir(parents=True)
    killed = begun(STOP_IN="distil_layers", STOP_WITH=str(int(signal.SIGKILL)))
    said = "".join(killed.communicate(timeout=120))
    assert killed.returncode == 2
    assert "1 of 3 runs failed: distil_layers (exit code -9, see student/distil_layers.log)" in said
    assert not (desk / "student" / "distil_logits").exists()
    assert not (desk / "student" / ".student.killed").exists()
    assert stopped((desk / "reached").exists, signal.SIGINT, STOP_IN="distil_logits") == 130
    assert json.loads((desk / "student" / "distil_logits" / "results.json").read_text())["status"] == "interrupted"
    assert stopped((desk / "reached").exists, signal.SIGKILL, STOP_IN="longer") == -signal.SIGKILL
    done = command(*staged, STAGES, "--output=student").ok()
    assert done.out.splitlines()[-12:] == whole.out.replace("whole", "student").splitlines()[-12:]
    for name in ("student", "distil_layers", "distil_logits", "longer"):
        states = [zoo.load(desk / output / name).state_dict() for output in ("whole", "student")]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name


@pytest.mark.slow
def test_another_command_is_refused(command: Command, desk: Path, taught: Path, staged: list[str]):
    staged += ["--stages=[train/distil_layers.yaml,longer.yaml]", "--trainer.max_steps=1", "--output=student"]
    first = command(*staged).ok()
    logs = {file.name: file.read_text() for file in (desk / "student").glob("*.log")}
    again = command(*staged)  # nothing is left to train
    assert again.code == 0
    assert again.out.splitlines()[-10:] == first.out.splitlines()[-10:]
    assert logs == {file.name: file.read_text() for file in (desk / "student").glob("*.log")}

    def refused(*change: str) -> str:
        failed = command(*staged, *change).refused()
        return failed.err

    other = "output: student/student was made by another command, whose"
    assert f"{other} mixer was GatedDeltaNet, and now it is GLA; delete student, or choose another output" in refused(
        "--mixer=GLA"
    )
    shutil.copytree(taught, desk / "more")
    assert command("fit", "--resume", "more", "--trainer.max_steps=3").code == 0
    assert f"{other} checkpoint has changed since" in refused("--checkpoint=more")
    said = refused("--optim.learning_rate=1e-5")
    assert "output: student/distil_layers is a run with optim.learning_rate: 0.001, and now it is 1e-05; delete" in said
    assert "or choose another output: --output=student-2" in said
    shutil.copytree(desk / "student", desk / "copy")
    moved = "output: copy was written as student, the path by which its stages find it; move it back, or choose another"
    assert moved in refused("--output=copy")
    shutil.rmtree(desk / "student" / "distil_layers")
    assert "output: student/longer was trained from another run distil_layers; delete it" in refused()
    assert "overwrite: stages continue what is in the output" in refused("--overwrite")
    (desk / "student" / "student" / "linearise.json").unlink()
    (desk / "student" / "student" / "hashes.json").unlink()
    assert "output: student/student was not written by linearise with stages; choose another" in refused()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--stages=[mising.yaml]"], "config: 'mising.yaml' is neither a file nor one of configs/"),
        (["--stages=[longer.yaml,longer.yaml]"], "config: longer.yaml and longer.yaml have the same name, longer"),
        ([STAGES, "--config=mising.yaml"], "config: 'mising.yaml' is neither a file nor one of configs/"),
        ([], "config: shared.yaml is for the stages of a training, and none is named; add --stages="),
        ([STAGES, "--mixer=Mamba1"], "mixer: Mamba1 has no matrix state"),
        ([STAGES, "--trainer.max_steps=0"], "trainer.max_steps: 0 leaves nothing to train"),
        ([STAGES, "--optim.schedule=cosin"], "optim.schedule: "),
        (
            [STAGES, "--output=full"],
            "output: full exists already and is a folder that holds mine, which is never replaced",
        ),
    ],
)
def test_mistakes_before_anything_is_written(
    change: list[str], message: str, command: Command, desk: Path, staged: list[str]
):
    (desk / "full").mkdir()
    (desk / "full" / "mine").touch()
    assert message in command(*staged, "--output=student", *change).sentence()
    assert [path.name for path in (desk / "full").iterdir()] == ["mine"]
    assert not [*(desk / "student").glob("*")]


@pytest.mark.slow
def test_a_mistake_in_a_stage_is_corrected(command: Command, desk: Path, staged: list[str]):
    stage = desk / "longer.yaml"
    for text, message in (
        ("optm: {learning_rate: 1.0e-4}", "optm.learning_rate: unknown key; did you mean 'optim.learning_rate'?"),
        ("teacher: {checkpoint: runs/other}", "stages: longer.yaml sets teacher.checkpoint to runs/other, but it is"),
        ("optim: {initial_weights: null}", "stages: longer.yaml sets optim.initial_weights to None, but it is student"),
    ):
        stage.write_text(text)
        failed = command(*staged, STAGES, "--output=student").refused()
        assert message in failed.err
        assert not (desk / "student").exists()
    stage.write_text("trainer: {max_steps: 1}")
    command(*staged, "--stages=[longer.yaml]", "--output=student").ok()
    assert zoo.load_tokenizer(desk / "student" / "longer").vocab_size == 512


@pytest.mark.slow
def test_checkpoints_of_others(hub: Hub, command: Command, desk: Path, taught: Path, staged: list[str]):
    """A run of someone else is refused; a public folder has nothing but a model and a tokenizer."""
    zoo.export(taught, desk / "theirs")
    (desk / "theirs" / "hashes.json").unlink()  # which holds the signature
    failed = command(*staged, "--checkpoint=theirs", STAGES, "--output=student").refused()
    assert "theirs was not written by you, and each stage would build its data, trainer and callbacks" in failed.err
    assert not (desk / "student").exists()
    public = zoo.convert(taught, desk / "public", to="huggingface")
    stages = ("--config=tiny.yaml", "--trainer.max_steps=1", "--stages=[train/distil_logits.yaml]")
    done = command(*staged, f"--checkpoint={public}", *stages, "--output=student").ok()
    assert "distil_logits" in done.out
    zoo.convert("student/distil_logits", "wrapped", to="transformers")
    assert zoo.statex("student/distil_logits", "larger", layers=[0]).folder.is_dir()
    with pytest.raises(zoo.UserError, match=r"o_norm\.eps is 1e-05 .* train with model\.norm_eps equal to the mixers'"):
        zoo.convert("student/distil_logits", "layout", to="fla")
    hub.add("ada/llama", public)
    student = zoo.linearise("hf://ada/llama", "alone", mixer="GatedDeltaNet", keep="every:3", tokens=64).folder
    for name, tensor in zoo.load("student/student").state_dict().items():
        assert torch.equal(tensor, zoo.load(student).state_dict()[name])


def test_a_teacher_with_other_tokens(command: Command, desk: Path, taught: Path):
    failed = command(*FIT, "--data.vocab_size=300", f"--teacher.checkpoint={taught}").refused()
    assert f"data.tokenizer: {taught} was trained with another tokenizer than that of the data" in failed.err
