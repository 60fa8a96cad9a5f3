"""What a person types, and what comes back."""

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

import cli
import mixers
import zoo
from kernels import UserError
from mixers import TokenMixer
from zoo.config.help import EXAMPLES
from zoo.config.signatures import subclasses
from zoo.train.results import COLUMNS

from .commands import FIT, Command, run_process


def resolved(command: Command, *arguments: str) -> dict:
    """The config that a command would run with."""
    printed = command("fit", *arguments, "--print_config").ok()
    return yaml.safe_load(printed.out)


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, with a hash of what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- configs, overlays and overrides


@pytest.mark.slow
def test_overrides_change_the_config_and_the_model(command: Command):
    overrides = ["--model.stack.second.factor=4", "--model.stack.second.mixer.num_heads=2"]
    slot = resolved(command, "--config", "gdn_h2.yaml", *overrides)["model"]["stack"]["init_args"]["second"]
    assert slot["init_args"]["factor"] == 4
    assert slot["init_args"]["mixer"]["init_args"]["num_heads"] == 2
    plain, changed = (zoo.build("gdn_h2.yaml", "model.vocab_size=64", *each, device="meta") for each in ([], overrides))
    # Mamba2, Gated DeltaNet, and 127 keys and values of a window of 128
    # 3 heads of 64 × 64 became 2 heads of 96 × 96, four times
    assert [m.state_size() for m in plain.mixers[:3]] == [49152, 3 * 64 * 64, 2 * 127 * 192]
    assert [m.state_size() for m in changed.mixers[:3]] == [49152, 4 * 2 * 96 * 96, 2 * 127 * 192]


@pytest.mark.slow
def test_the_last_one_wins(command: Command, desk: Path):
    (desk / "five.yaml").write_text("model: {num_layers: 5}\n")
    names = ["--config", "gdn_h2.yaml", "--config", "five.yaml"]
    assert resolved(command, *names)["model"]["num_layers"] == 5
    assert resolved(command, *names, "--model.num_layers=4")["model"]["num_layers"] == 4
    assert resolved(command, "--model.num_layers=4", *names)["model"]["num_layers"] == 5
    sizes = resolved(command, *names, "--config", "size/400m.yaml")["model"]
    assert (sizes["num_layers"], sizes["hidden_size"], sizes["vocab_size"]) == (24, 1024, 32000)


# --- runs


@pytest.mark.slow
def test_fit_leaves_a_run(finished: Path):
    run = finished / "runs" / "done"
    assert {"config.yaml", "tokenizer.json", "metrics.jsonl", "results.json", "loss.png", "samples.txt"} <= {
        *contents(run)
    }
    results = json.loads((run / "results.json").read_text())
    assert set(COLUMNS) < results.keys()
    assert (results["status"], results["steps"], results["tokens_seen"]) == ("complete", 4, 4 * 2 * 32)
    for name in ("val_loss", "bigram_loss", "val_loss_mixers_zeroed", "forward_flops_per_token"):
        assert results[name] > 0
    model = zoo.build(run / "config.yaml", device="meta")  # the run's config is complete
    assert (results["parameters"], results["state_size"]) == (model.num_parameters(), model.state_size(32))


@pytest.mark.slow
def test_fit_says_what_it_does(command: Command):
    done = command(*FIT, "--run", "talk", "--trainer.val_check_interval=2").ok()
    for part in ("Mamba2", "GatedDeltaNet", "SlidingWindowAttention", "whole model", "sample after 2 steps"):
        assert part in done.out
    assert "interpolated bigram model" in done.out.split("talk: 4 steps, 256 tokens")[1]
    assert "Warning" not in done.err  # library authors' business
    assert "\r" not in done.err
    assert "training: 4/4 steps, " in done.err


@pytest.mark.slow
def test_runs_of_the_same_second_have_folders_of_their_own(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.strftime", lambda _: "20300101-120000")
    for _ in range(2):
        command(*FIT, "--trainer.max_steps=1", "--trainer.limit_val_batches=0")
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "gdn_h2-20300101-120000",
        "gdn_h2-20300101-120000-2",
    ]


@pytest.mark.slow
def test_a_failed_start_does_not_use_up_the_name(command: Command):
    assert command(*FIT, "--run", "x", "--optim.initial_weights=typo").code == 2
    assert command(*FIT, "--run", "x", "--trainer.max_steps=1").code == 0


@pytest.mark.slow
def test_too_little_memory_is_one_sentence(tmp_path: Path, shared_cache: Path):
    large = ("fit", "--config", "gla.yaml", "--model.hidden_size=99000000")
    said = run_process(tmp_path, shared_cache, *large, timeout=120).sentence()
    assert said.startswith("not enough memory: PyTorch tried to allocate ")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "said"), [("1", "1 of"), ("1.0", "all"), ("3", "3 of")])
def test_a_number_of_batches_is_no_fraction(command: Command, finished: Path, value: str, said: str) -> None:
    """`typing` may have turned Lightning's `Union[int, float]` round, by which 1 would be 1.0: all batches."""
    done = command("validate", "--checkpoint", str(finished / "runs" / "done"), f"--trainer.limit_val_batches={value}")
    assert done.code == 0, done.err
    assert f"validated on {said}" in done.out


@pytest.mark.slow
def test_evaluation_of_a_run(command: Command, finished: Path):
    run = str(finished / "runs" / "done")
    validated = command("validate", "--checkpoint", run, "--trainer.limit_val_batches=2").ok()
    assert re.search(r"validated on 2 of \d+ batches \(trainer.limit_val_batches\)", validated.out)
    results = json.loads((finished / "runs" / "done" / "results.json").read_text())
    assert re.search(
        rf"│ validation +│ +{results['val_loss']:.3f} │ +{results['val_bits_per_byte']:.3f} │", validated.out
    )  # of the same two batches
    assert "done: 256 tokens" in validated.out
    assert f"next: python cli.py evaluate --checkpoint {run} --tasks=list" in validated.out
    command("predict", "--checkpoint", run, "--output", "p.jsonl", "--trainer.limit_predict_batches=2").ok()
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [len(row["losses"]) for row in rows] == [32] * 4
    mean = sum(sum(row["losses"]) for row in rows) / 128
    assert mean == pytest.approx(results["val_loss"], abs=1e-4)


# --- help


def test_help_shows_every_verb(command: Command):
    shown = command("--help")
    assert shown == command() == command("-h")
    assert shown.code == 0
    for verb in ("fit", "validate", "test", "predict", "generate", "mixers"):
        assert f"\n  {verb} " in shown.out
    assert "python cli.py fit --config gdn_h2.yaml" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 120


def test_help_of_a_verb_shows_its_keys(command: Command):
    fit, validate, generate = (command(verb, "--help") for verb in ("fit", "validate", "generate"))
    assert fit.code == validate.code == generate.code == 0
    assert len(fit.out.splitlines()) < 60
    assert fit.out.index("examples:") < fit.out.index("\noptions:") < fit.out.index("keys of a config (--help KEY ")
    for key in ("model", "optim", "data", "trainer", "samples"):
        assert f"\n  {key} " in fit.out, key
    assert "runs/NAME" in fit.out
    assert generate.out.count("Continue a prompt") == 1  # not once more as the heading of its options
    assert "--checkpoint" in validate.out
    assert "\n  --resume RESUME" in fit.out
    assert "\n  --resume" not in validate.out
    assert "the likeliest token" in generate.out


@pytest.mark.parametrize("verb", ["fit", "sweep"])
def test_no_key_is_without_a_word(command: Command, verb: str):
    keys = command(verb, "--help").out.partition("\nkeys of a config")[2].splitlines()[1:]
    assert len(keys) > 10
    assert [key for key in keys if len(key.split()) < 3] == []


def test_help_of_a_key_and_of_everything(command: Command):
    model, data, everything = (command("fit", "--help", topic) for topic in ("model", "data", "all"))
    assert model.code == data.code == everything.code == 0
    assert "Size of the residual stream" in model.out  # from the docstring of the constructor
    assert "--trainer" not in model.out
    assert "--data.sequence_length" in data.out  # of TextData
    assert "python cli.py fit --data.help MixedText" in data.out
    assert "--trainer.max_epochs" not in command("fit", "--help", "trainer.max_steps").out
    assert "--data.sequence_length" in command("fit", "--data.help", "TextData").out
    for key in ("--model.hidden_size", "--optim.learning_rate", "--data", "--trainer.max_steps", "--run", "--resume"):
        assert key in everything.out, key
    assert "--axes" in command("sweep", "--help", "axes").out
    wrong = command("fit", "--help", "modle").refused()
    assert wrong.err.startswith("error: --help modle: no key of fit (keys: seed_everything, ")


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_examples_of_help_parse(command: Command, line: str):
    _, _, verb, *arguments = shlex.split(line)
    if verb in ("fit", "sweep") and "--resume" not in arguments:
        assert command(verb, *arguments, *(["--print_config"] if verb == "fit" else [])).code == 0
        return
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    shown = command(verb, "--help", "all").out if verb in ("compare", "fit") else command(verb, "--help").out
    assert all(f"{name} " in shown or f"{name}," in shown for name in names), shown


def test_table_of_mixers(command: Command):
    table = command("mixers").ok()
    for name in mixers.names():
        assert f" {name} " in table.out
        assert mixers.entry(name).recurrence[:40] in table.out
    assert "grows" in table.out
    narrow = command("mixers", "--hidden_size=64", "--num_heads=2")
    assert narrow.out != table.out
    assert "hidden size 64, 2 heads" in narrow.out


def test_everything_about_one_mixer(command: Command):
    page = command("mixers", "GatedDeltaNet").ok()
    assert "arXiv 2412.06464" in page.out
    assert "allow_neg_eigval" in page.out
    config = yaml.safe_load(page.out.partition("in a config\n")[2])
    assert isinstance(zoo.build(config, "model.vocab_size=64", device="meta").mixers[0], mixers.GatedDeltaNet)


def test_a_page_about_a_mixer_fits_into_100_columns(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = command("mixers", "HGRN2").out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "bounds lb rise" not in lines  # a line of the docstring, which is wrapped anew


# --- a mixer of one's own

OWN = '''
"""A mixer that the project has never heard of."""

import torch
import torch.nn.functional as F
from torch import nn

from kernels import at_least_fp32
from mixers import LinearMixer, Projection, Streams, split_heads


class Forgetful(LinearMixer):
    """S_t = f_t S_{t-1} + k_t v_t^T with one gate f_t per head."""

    def __init__(self, site, *, num_heads: int | None = None):
        num_heads, size = site.heads(num_heads)
        super().__init__(site, num_heads=num_heads, key_size=size, value_size=size)
        width = num_heads * size
        self.in_proj = Projection(site.hidden_size, {"q": width, "k": width, "v": width, "f": self.gate_heads})
        self.out_proj = nn.Linear(width, site.hidden_size, bias=False)

    def project(self, x):
        q, k, v, f = self.in_proj(x)
        return Streams(*(split_heads(s, self.num_heads) for s in (q, k, v)), f)

    def gates(self, s):
        return s.replace(log_decay=F.logsigmoid(at_least_fp32(s.log_decay)))

    def readout(self, o, s):
        return self.out_proj(o.flatten(2))
'''


@pytest.mark.slow
def test_a_mixer_in_a_file_of_ones_own(command: Command, desk: Path):
    assert len(OWN.strip().splitlines()) < 40
    (desk / "my_mixers.py").write_text(OWN)
    (desk / "mine.yaml").write_text("""
model:
  stack:
    class_path: H1
    init_args:
      first: my_mixers.Forgetful
      second: {class_path: Expanded, init_args: {factor: 2, mixer: {class_path: my_mixers.Forgetful}}}
""")
    done = command("fit", "--config", "mine.yaml", "--config", "tiny.yaml", "--run", "mine").ok()
    assert done.out.count("Forgetful") == 2  # two kinds of layers, as one is expanded
    assert json.loads(Path("runs/mine/results.json").read_text())["status"] == "complete"
    slots = ["--config", "mine.yaml", "--model.stack.first.num_heads=1"]
    assert resolved(command, *slots)["model"]["stack"]["init_args"]["first"]["init_args"]["num_heads"] == 1
    mixers.check_mixer(mixers.get("my_mixers.Forgetful"))


# --- mistakes


@pytest.fixture(scope="session")
def messy(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a complete run, and with files that are not what they should be."""
    folder = tmp_path_factory.mktemp("messy") / "desk"
    shutil.copytree(finished, folder)
    checkpoint = (folder / "runs" / "done" / "checkpoints" / "last.ckpt").read_bytes()
    for name, data in {
        "latin.txt": "café ".encode("latin-1") * 99,
        "short.txt": b"hello\n",
        "file": b"not a folder",
        "slip.py": b"class Slip(:\n",
        "letters.yaml": b"model: {stack: {class_path: Pattern, init_args: {pattern: MX, mixers: {M: Mamba2}}}}\n",
        "list.yaml": b"- model\n- data\n",
        "open.yaml": b"model: {hidden_size: 3\n",
        "picture.yaml": b"\x89PNG\xff\xfe",
        "typo.yaml": b"model: {stack: {second: {mixer: {num_head: 2}}}}\n",
        "top.yaml": b"optimiser: {learning_rate: 1}\n",
        "cut.ckpt": checkpoint[: len(checkpoint) // 2],
    }.items():
        (folder / name).write_bytes(data)
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, folder / "foreign.ckpt")
    (folder / "gone.txt").symlink_to("nowhere.txt")
    return folder


ASK = ("generate", "--checkpoint", "runs/done")
SECOND = "model.stack.second"
STEPS = "torch.optim.lr_scheduler.StepLR"
# one kind of layer, so that the config is read in half the time
PLAIN = ("--config", "gla.yaml", "--config", "tiny.yaml")
MISTAKES = {
    # what does not exist
    (*FIT[1:], "--model.stack=H3"): ("model.stack", "'H3'", "(known: H1, H2, "),
    (*FIT[1:], "--data=slip.Slip"): ("slip.py, line 1, is not Python (invalid syntax)",),
    # keys
    (*FIT[1:], f"--{SECOND}.mixer.qk.nrm=l1"): (f"{SECOND}.mixer.qk.nrm", "did you mean 'norm'?"),
    (*FIT[1:], "--config", "typo.yaml"): (f"{SECOND}.mixer.num_head", "did you mean 'num_heads'?"),
    (*PLAIN, "--config", "top.yaml"): ("optimiser", "did you mean 'optim.learning_rate'?"),
    # values
    (*FIT[1:], f"--{SECOND}.mixer.qk.norm=l3"): (f"{SECOND}.mixer.qk.norm", "'l3' is not one of none, l2, l1"),
    (*FIT[1:], f"--{SECOND}.mixer=SlidingWindowAttention"): (f"{SECOND}.mixer", "does not fit here", "LinearMixer"),
    # data
    (*PLAIN, "--data.path=missing.txt"): ("data.path", "missing.txt does not exist"),
    (*PLAIN, "--data.path=gone.txt"): ("data.path", "gone.txt is a link to nowhere.txt, which does not exist"),
    (*PLAIN, "--data.path="): ("data.path: '' is empty",),
    (*PLAIN, "--backend="): ("backend: '' is not one of",),
    (*PLAIN, "--data.path=short.txt"): ("data.sequence_length is 32", "tokens"),
    (*PLAIN, "--model.vocab_size=300"): ("model.vocab_size", "300 is smaller than the tokenizer's 512 tokens"),
    (*PLAIN, "--data.tokenizer=file"): ("data.tokenizer", "file is not a tokenizer.json"),
    # what the constructors refuse themselves, at any depth
    (*PLAIN, "--data.batch_size=0"): ("data.batch_size is 0", "at least 1"),
    (*PLAIN, "--data.packing=rows"): ("data.packing", "'rows' is not one of windows, documents"),
    ("--config", "tiny.yaml", "--optim.initial_weights=nothing"): (
        "optim.initial_weights: there is nothing at nothing",
    ),
    ("--config", "letters.yaml", "--config", "tiny.yaml"): ("pattern", "'MX' has no mixer for ['X']"),
    # files that are no configs
    ("--config", "list.yaml"): ("config", "list.yaml holds no keys"),
    ("--config", "open.yaml"): ("config", "open.yaml is not YAML"),
    ("--config", "picture.yaml"): ("config", "picture.yaml cannot be read as text"),
    # runs and checkpoints
    (*FIT[1:], "--run", "done"): ("runs/done exists already", "--resume runs/done"),
    (*FIT[1:], "--run", "./file/x"): ("the folder file/x cannot be created",),
    ("--resume", "cut.ckpt"): ("cut.ckpt is a file", "the run's folder"),
    ("--resume", "done", "--run", "x"): ("--run", "--resume", "one of them"),
    ("--resume", "done", "--model.hidden_size=64", "--trainer.max_steps=6"): ("the checkpoint does not fit the model",),
    ("--resume", "done", "--data.seed=1", "--trainer.max_steps=6"): ("data.seed is 1", "trained with 0"),
    (*PLAIN, "--optim.initial_weights=cut.ckpt"): ("cut.ckpt is truncated or not a checkpoint",),
    (*PLAIN, "--optim.initial_weights=foreign.ckpt"): ("foreign.ckpt does not fit the model",),
    ("validate", "--checkpoint", "runs/done", "--model.hidden_size=64"): ("the checkpoint does not fit the model",),
    ("predict", "--checkpoint", "runs/done", "--output", "file"): ("output", "file exists already"),
    ("predict", "--checkpoint", "runs/done", "--output", "no/p.jsonl"): ("output", "the folder no does not exist"),
    ("compare", *PLAIN, "--folder=file"): ("folder: the folder file cannot be created: File exists",),
    # devices
    (*PLAIN, "--trainer.accelerator=abacus"): ("trainer", "abacus"),
    (*PLAIN, "--trainer.devices=0"): ("trainer", "devices"),
    (*PLAIN, "--trainer.strategy=magic"): ("trainer", "magic"),
    (*PLAIN, "--trainer.accelerator=cpu", "--trainer.devices=[0,1]"): ("trainer", "devices", "int"),
    (*PLAIN, "--trainer.accumulate_grad_batches=0"): ("trainer.accumulate_grad_batches: 0 must be at least 1",),
    (*PLAIN, "--trainer.max_steps=0"): ("trainer.max_steps: 0 leaves nothing to train; it must be at least 1, or -1",),
    (*PLAIN, "--trainer.limit_train_batches=0"): ("trainer.limit_train_batches: 0 leaves nothing to train",),
    (*PLAIN, "--trainer.min_steps=100"): ("trainer.min_steps: 100 is above trainer.max_steps, 4, where the run ends",),
    (*PLAIN, "--run="): ("run: '' is empty; write a value, or leave it out",),
    ("generate", "--checkpoint="): ("checkpoint: '' is empty",),
    ("validate", "--checkpoint", "runs/done", "--trainer.limit_val_batches=0"): (
        "trainer.limit_val_batches: 0 leaves nothing to measure",
    ),
    ("predict", "--checkpoint", "runs/done", "--trainer.limit_predict_batches=0"): (
        "trainer.limit_predict_batches: 0 leaves nothing",
    ),
    (*PLAIN, "--trainer.val_check_interval=0"): ("trainer.val_check_interval: 0 must be above 0",),
    # options without effect, since another one is missing
    (*PLAIN, "--guard.window=50"): ("guard.window is 50, but guard.spike is null",),
    (*PLAIN, "--checkpoints.keep_last=3"): ("checkpoints.keep_last is 3, but keep_every_n_steps is null",),
    ("sweep", "--config", "sweep/heads.yaml", "--cluster_options={a: 1}"): ("cluster_options: {'a': 1}", "--cluster"),
    ("sweep", "--config", "sweep/heads.yaml", "--cluster=slurm", "--jobs=2"): ("jobs: 2", "cluster is slurm"),
    (*PLAIN, "--config", "train/cpu_deepspeed.yaml", "--trainer.strategy.offload_parameters=cpu"): (
        "trainer.strategy: offload_parameters needs stage 3",
    ),
    # optimisers, schedules and callbacks
    (*PLAIN, "--seed_everything=-3"): ("seed_everything: -3 must be a number from 0 to 4294967295, true or false",),
    (*PLAIN, "--optim.class_path=torch.optim.SDG"): ("optim.optimizer: the module 'torch.optim' has no 'SDG'",),
    (*PLAIN, "--optim=Lion"): (
        "optim.optimizer: 'Lion' is not a known class; write its dotted path, package.module.C",
    ),
    (*PLAIN, "--optim=SGD", "--optim.optimizer.lr=1"): ("optim.optimizer.lr: set optim.learning_rate instead",),
    (*PLAIN, "--optim=Adam", "--optim.eps=1"): ("optim.eps is 1.0, but is for AdamW; those of another optimiser are",),
    (*PLAIN, "--optim=torch.nn.Linear"): ("optim.optimizer: torch.nn.Linear is not an Optimizer",),
    (*PLAIN, "--optim=os.system"): ("optim.optimizer: 'os.system' is not an Optimizer; write its dotted path",),
    (*PLAIN, "--optim=torch.optim"): ("optim.optimizer: 'torch.optim' is a module; name a class in it",),
    (*PLAIN, "--optim=Muon"): (
        "optim.optimizer: Muon is the name of several classes; write one of torch.optim.Muon, ",
    ),
    (*PLAIN, "--data=mixers.GLA"): ("data: mixers.GLA is not a LightningDataModule",),
    (*PLAIN, "--trainer.deterministic=maybe"): (
        "trainer.deterministic: 'maybe' is not one of warn, nor true or false",
    ),
    (*PLAIN, f"--optim.schedule={STEPS}", "--optim.schedule.step_size=a"): (
        "optim.schedule.step_size: 'a' is not a whole",
    ),
    (*PLAIN, "--data.batch_size=100000"): ("data.batch_size is 100000; the training data has only ",),
    # other verbs
    ("generate", "--checkpoint", "done"): ("there is nothing at done; did you mean runs/done?",),
    (*ASK, "--prompt=a", "--device=meta"): (
        "device: meta is for models without weights",
        "names are cpu, cuda, cuda:0, mps",
    ),
    (*ASK, "--prompt=a\udcff"): (r"prompt: 'a\udcff' cannot be encoded as UTF-8",),
    (*ASK, "--top_p=2"): ("top_p is 2",),
    (*ASK, "--device=abacus"): ("device: abacus cannot be used here",),
    ("mixers", "GatedDeltaNte"): ("did you mean 'GatedDeltaNet'?",),
    ("mixers", "--hidden_size=100"): ("num_heads: 8 does not divide hidden_size 100",),
    ("mixers", "GLA", "--length=-1"): ("length: -1 must be at least 1",),
}


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", ""), ("RANK", "foo"), ("WORLD_SIZE", "two")])
def test_launcher_variables_must_be_numbers(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["cli.py", "mixers", "GLA"])
    assert cli.started() == 2
    assert capsys.readouterr().err.startswith(f"error: {name}: this environment variable is {value!r} instead of a num")


VERBS = ("fit", "sweep", "compare", "validate", "predict", "generate", "mixers")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence(
    arguments: tuple[str, ...], command: Command, messy: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(messy)
    before = contents(messy)
    failed = command(*arguments) if arguments and arguments[0] in VERBS else command("fit", *arguments).refused()
    (line,) = (line for line in failed.err.splitlines() if line.startswith("error: "))
    assert failed.err.endswith(line + "\n")  # it is the last thing on the screen
    for part in MISTAKES[arguments]:
        assert part in line
    for other in (each for each in subclasses(TokenMixer) if each.__module__.startswith("tests")):
        line = line.replace(f"{other.__name__}, ", "")  # other tests' mixers are known in this process, too
    assert len(line) < 700
    for jargon in ("Traceback", "Parser key", "Namespace(", "<class", "subcommand"):
        assert jargon not in failed.err
    assert contents(messy) == before  # nothing is overwritten, nothing left behind


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_that_cannot_be_written(command: Command, desk: Path):
    (desk / "runs").mkdir(mode=0o500)
    failed = command(*FIT, "--run", "x").refused()
    assert "runs/x cannot be created: Permission denied" in failed.err


@pytest.mark.slow
def test_exit_code_and_stream_of_a_process(desk: Path, shared_cache: Path):
    done = run_process(desk, shared_cache, "fit", "--config", "gdn_h3.yaml", fresh=True, timeout=120)
    assert done.out == ""
    hint = "did you mean 'gdn_h1.yaml' or 'gdn_h2.yaml'?"
    assert done.sentence() == f"config: 'gdn_h3.yaml' is neither a file nor one of configs/; {hint}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("mixers.GatedDeltaNet", RuntimeError),
        ("mixers.GatedDeltaNet", ValueError),
        ("mixers.GatedDeltaNet", TypeError),
        ("zoo.LanguageModel", ValueError),
        ("zoo.data.TextData", ValueError),
        ("zoo.lm.stack.H2", ValueError),
    ],
)
def test_a_bug_of_ours_keeps_its_traceback(
    place: str, kind: type[Exception], command: Command, monkeypatch: pytest.MonkeyPatch
):
    original = functools.reduce(getattr, place.split(".")[1:], {"mixers": mixers, "zoo": zoo}[place.split(".")[0]])

    @functools.wraps(original.__init__)
    def broken(self, *args, **kwargs):
        raise kind("a bug")

    monkeypatch.setattr(original, "__init__", broken)
    with pytest.raises(Exception, match="a bug"):  # perhaps the parser's own, raised from it; not the exit with code 2
        command(*FIT, "--run", "x")


def test_a_mistake_is_an_exception_in_python(desk: Path):
    with pytest.raises(UserError, match="'train' is not a verb"):
        cli.run(["train"])
