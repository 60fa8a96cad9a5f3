"""What a terminal shows when something is missing or interrupted: a sentence or nothing, never a traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo.display import screen_text

from .commands import CLI, FIT, Command, run_process, start
from .forked_python import forked_python

AS_A_PROGRAM = """
import runpy, sys
sys.argv = ["cli.py", *sys.argv[1:]]
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "torch" and "fit" in sys.argv:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
try:
    runpy.run_path(CLI, run_name="__main__")
finally:
    sys.stderr.write(" ".join(sys.modules))
"""


def loaded(*arguments: str) -> tuple[int, str, set[str]]:
    """Exit code, output and imported modules of `python cli.py …`; `fit` is interrupted when it imports torch."""
    code = AS_A_PROGRAM.replace("CLI", repr(str(CLI)))
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, set(done.stderr.split())


def test_help_imports_next_to_nothing():
    code, out, modules = loaded("--help")
    assert code == 0
    assert "python cli.py fit --config gdn_h2.yaml" in out
    assert not modules & {"torch", "numpy", "lightning", "jsonargparse", "rich", "kernels", "mixers", "zoo"}
    assert len(modules) < 250


def test_ctrl_c_during_the_imports_is_no_traceback():
    code, out, modules = loaded("fit", "--config=gdn_h2.yaml")
    assert code == 130
    assert out == ""
    assert "Traceback" not in modules


def test_a_reader_that_leaves_ends_generate(command: Command, finished: Path, monkeypatch: pytest.MonkeyPatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        done = command("generate", "--checkpoint", str(finished / "runs" / "done"), "--prompt=def", "--device=cpu")
    assert done.code == 141  # as of a process that SIGPIPE ended
    assert done.err == ""


@pytest.mark.slow
def test_a_run_outlives_its_reader(desk: Path, shared_cache: Path):
    process = start(desk, shared_cache, *FIT, "--run=piped", "--trainer.val_check_interval=1")
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    err = process.stderr.read()
    assert process.wait(60) == 0
    assert "Traceback" not in err
    assert "warning: nothing reads the output any more; the command continues without it" in err
    assert json.loads((desk / "runs/piped/results.json").read_text())["status"] == "complete"


AT_100_COLUMNS = """
import os, pty, subprocess, struct, fcntl, termios, sys
leader, follower = pty.openpty()
fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
process = subprocess.Popen(sys.argv[1:], stdout=follower, stderr=follower)
os.close(follower)
while True:
    try:
        part = os.read(leader, 4096)
    except OSError:  # the other end is closed
        break
    sys.stdout.buffer.write(part)
sys.exit(process.wait())
"""


def on_a_terminal(desk: Path, cache: Path, *arguments: str) -> list[str]:
    """The lines that `python cli.py …` leaves on a terminal of 100 columns; what was overwritten is gone."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    shown = subprocess.run(
        [sys.executable, "-c", AT_100_COLUMNS, forked_python(), str(CLI), *arguments],
        cwd=desk,
        env={**environment, "ZOO_CACHE": str(cache), "TERM": "xterm"},
        capture_output=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout.decode()).replace("\r\n", "\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]


@pytest.mark.slow
@pytest.mark.parametrize("interval", [2, 3], ids=["validated last", "not validated last"])
def test_what_a_run_shows(interval: int, desk: Path, shared_cache: Path):
    lines = on_a_terminal(desk, shared_cache, *FIT, f"--trainer.val_check_interval={interval}", "--run=r")
    assert "── sample after 4 steps ──" in lines  # whole, in a line of its own
    bar = next(line for line in lines if line.startswith("training 4/4 |"))
    assert len(bar) <= 100
    assert bar.count("█") >= 15
    assert "results, curve, checkpoints and config are in runs/r" in lines
    assert 'next: python cli.py generate --checkpoint runs/r --prompt "def "' in lines


@pytest.mark.slow
def test_predict_says_where_the_losses_are(command: Command, finished: Path):
    done = command("predict", f"--checkpoint={finished / 'runs' / 'done'}", "--trainer.limit_predict_batches=1")
    assert done.out.splitlines()[-1] == "losses.jsonl: the loss of every token in nats, one line a sequence"


STOPPING = "lightning.pytorch.callbacks.EarlyStopping"
NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without a GPU")


@pytest.mark.slow
def test_a_metric_that_is_not_logged(command: Command):
    monitor = f"{{class_path: {STOPPING}, init_args: {{monitor: val_lss}}}}"
    done = command(*FIT, f"--trainer.callbacks={monitor}").refused()
    assert done.err.splitlines()[-1].startswith(
        "error: trainer: Early stopping conditioned on metric `val_lss` which is"
    )


@pytest.mark.slow
@NO_GPU
@pytest.mark.parametrize(
    ("overlay", "advice"),
    [
        ("zero2", "add --config train/cpu_deepspeed.yaml"),
        ("ddp", "set --trainer.accelerator=cpu --trainer.devices=1 (or more)"),
    ],
)
def test_a_gpu_that_is_not_there(command: Command, desk: Path, overlay: str, advice: str):
    done = command(*FIT, f"--config=train/{overlay}.yaml").refused()
    assert done.err == f"error: trainer.accelerator: gpu, but PyTorch finds no GPU here; for the CPU, {advice}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlay", "advice"),
    [("zero2", "add --config train/cpu_deepspeed.yaml"), ("fsdp", "set --trainer.devices=1 (or more)")],
)
def test_all_gpus_of_a_processor(command: Command, desk: Path, overlay: str, advice: str):
    done = command(*FIT, f"--config=train/{overlay}.yaml", "--trainer.accelerator=cpu").refused()
    assert done.err == f"error: trainer.devices: -1 means all GPUs; for processes on the CPU, {advice}\n"


@pytest.mark.slow
def test_a_model_whose_mixer_lies_in_another_folder(command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch):
    there, here = desk / "there", desk / "here"
    there.mkdir()
    here.mkdir()
    (there / "far_mixer.py").write_text("import mixers\n\nclass Far(mixers.LinearAttention):\n    pass\n")
    monkeypatch.syspath_prepend(str(there))
    fit = ("fit", "--config=linear_attention.yaml", "--config=tiny.yaml", "--model.stack.mixer=far_mixer.Far")
    assert command(*fit, f"--run={desk}/run", "--trainer.max_steps=1", "--trainer.val_check_interval=1").code == 0
    sys.path.remove(str(there))
    del sys.modules["far_mixer"]
    monkeypatch.chdir(here)
    done = command("generate", f"--checkpoint={desk}/run").refused()
    assert done.err == (
        "error: model.stack.mixer: 'far_mixer.Far' cannot be imported, as there is no module 'far_mixer' in this "
        "folder or installed; go to the folder that it is in, or add that to PYTHONPATH\n"
    )


@pytest.mark.slow
def test_two_processes_say_it_once(desk: Path, shared_cache: Path):
    (desk / "short.txt").write_text("too short " * 20)
    ways = ("--trainer.strategy=ddp", "--trainer.devices=2", "--data.path=short.txt")
    done = run_process(desk, shared_cache, *FIT, *ways, timeout=180).refused()
    assert done.err.count("error: ") == 1


def test_rows_that_two_processes_cannot_share(command: Command, desk: Path):
    done = command(*FIT, "--trainer.strategy=ddp", "--trainer.devices=2", "--data.batch_size=3").refused()
    assert done.err.startswith("error: data.batch_size: 3 counts the rows of all devices, so it must be a multiple of")


def test_text_of_models_is_not_obeyed():
    assert screen_text("a\x1b[31mb\x07\n\tc\x9b2J é字\u202e") == "a\\x1b[31mb\\x07\n\tc\\x9b2J é字\\u202e"


@pytest.mark.slow
def test_prompts_of_a_config_are_not_obeyed(command: Command, desk: Path):
    (desk / "red.yaml").write_text('samples: {prompts: ["\\x1b[31mred"]}\n')
    done = command(*FIT, "--config", "red.yaml", "--run", "red").ok()
    assert "\x1b[31mred" not in done.out
    assert "\\x1b[31mred" in done.out
    assert "\x1b[31mred" in (desk / "runs/red/samples.txt").read_text()  # a file is as it is


WRONG_WIDTHS = """
from torch import nn
from mixers import Features, LinearMixer, Projection, Site, Streams, split_heads

class TooWide(LinearMixer):
    def __init__(self, site: Site, *, surplus: tuple[int, int]):
        heads, size = site.heads(None)
        streams = {"q": Features(), "k": Features(), "v": Features()}
        super().__init__(site, num_heads=heads, key_size=size, value_size=size, **streams)
        width = heads * size
        self.in_proj = Projection(site.hidden_size, {"q": width + surplus[0] * heads, "k": width, "v": width})
        self.out_proj = nn.Linear(width + surplus[1], site.hidden_size)
    def project(self, x):
        return Streams(*(split_heads(stream, self.num_heads) for stream in self.in_proj(x)))
    def readout(self, o, s):
        return self.out_proj(o.flatten(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("surplus", "said"), [("[1,0]", "ValueError: k: "), ("[0,1]", "too_wide.py, line 16: Runtime")]
)
def test_an_own_mixer_that_does_not_fit_is_named(command: Command, desk: Path, surplus: str, said: str):
    (desk / "too_wide.py").write_text(WRONG_WIDTHS)
    mixer = ("--model.stack.third=too_wide.TooWide", f"--model.stack.third.surplus={surplus}")
    done = command(*FIT, *mixer).refused()
    assert f"error: model.stack: layer 2, TooWide, fails: {said}" in done.err
    assert "Traceback" not in done.err


def test_an_own_module_that_fails_is_named(command: Command, desk: Path):
    (desk / "unlicensed.py").write_text("import os\nraise RuntimeError('no licence')\n")
    done = command(*FIT, "--model.stack.third=unlicensed.Mixer").refused()
    cause = "unlicensed.py, line 2: RuntimeError: no licence"
    assert done.err == f"error: model.stack.third: 'unlicensed.Mixer' cannot be imported: {cause}\n"
