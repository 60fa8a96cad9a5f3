"""What users of Lightning's command line expect of `ZooCLI`, and what it keeps of this project's."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from kernels import UserError
from zoo.config.keys import KEYS
from zoo.runs.command_line import ZooCLI

from .commands import FIT, Command

pytestmark = pytest.mark.slow

ONE_STEP = (*FIT, "--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--run=r")


class Linked(ZooCLI):
    """A command line with an argument and a callback of its own, and links."""

    calls: ClassVar[list[str]] = []

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--layers", type=int, default=2, help="How many layers.")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults({"early_stopping.monitor": "val_loss"})
        parser.link_arguments("layers", "model.num_layers")
        parser.link_arguments("data.init_args.sequence_length", "samples.max_new_tokens", compute_fn=lambda n: n // 8)
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        self.calls.append("before_instantiate_classes")

    def before_fit(self) -> None:
        self.calls.append(f"before_fit {self.trainer.global_step}")

    def after_fit(self) -> None:
        self.calls.append(f"after_fit {self.trainer.global_step}")


def test_it_is_lightnings(desk: Path) -> None:
    done = ZooCLI([*ONE_STEP, "--data.test_fraction=0.1"])
    assert isinstance(done, LightningCLI)
    assert done.result.row["steps"] == 1
    assert done.result.folder == Path("runs/r")
    assert done.trainer.global_step == 1
    assert {*vars(done.config.fit)} >= {"seed_everything", "compile"}
    assert done.config.fit.model.hidden_size == 32
    for verb in ("validate", "test"):
        metrics = ZooCLI([verb, "--checkpoint=runs/r"]).result
        assert metrics[f"{verb.replace('validate', 'val')}_loss"] > 0
    assert ZooCLI(["predict", "--checkpoint=runs/r", "--output=p.jsonl"]).result == Path("p.jsonl")
    assert len(json.loads(Path("p.jsonl").read_text().splitlines()[0])["losses"]) == 32


def test_a_subclass_adds_arguments_callbacks_and_links(desk: Path) -> None:
    Linked.calls.clear()
    done = Linked([*ONE_STEP, "--layers=1", "--early_stopping.patience=7"])
    written = yaml.safe_load(Path("runs/r/config.yaml").read_text())
    assert written["model"]["num_layers"] == len(done.result.model.layers) == 1
    assert written["samples"]["max_new_tokens"] == 32 // 8
    assert written["model"]["vocab_size"] == done.datamodule.vocab_size == 512
    (early,) = (each for each in done.trainer.callbacks if isinstance(each, EarlyStopping))
    assert (early.monitor, early.patience) == ("val_loss", 7)
    assert Linked.calls == ["before_instantiate_classes", "before_fit 0", "after_fit 1"]
    assert {*written} <= {*KEYS}  # what a subclass has added is not of the run


def test_arguments_of_a_subclass_may_be_in_a_config(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.yaml").write_text("layers: 1\nearly_stopping: {patience: 5}\nmodel: {hidden_size: 16}\n")
    with pytest.raises(SystemExit, match=r"^0$"):
        Linked([*ONE_STEP, "--config=more.yaml", "--layers=3", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["layers"], printed["model"]["num_layers"], printed["model"]["hidden_size"]) == (3, 3, 16)
    assert printed["early_stopping"]["patience"] == 5
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--layer=2", "layer: unknown key; did you mean 'layers'?"),
        ("--model.hiden_size=2", "model.hiden_size: unknown key; did you mean 'hidden_size'?"),
        ("--layers=some", "layers"),
        ("--early_stopping.patience=[1]", "early_stopping.patience"),
    ],
)
def test_mistakes_in_the_arguments_of_a_subclass(desk: Path, argument: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        Linked([*ONE_STEP, argument])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("runs").exists()


class Parted(EarlyStopping):
    """A callback with a component."""

    def __init__(self, part: EarlyStopping | str | None = None, other: EarlyStopping | None = None):
        super().__init__("val_loss")


class WithParts(ZooCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Parted, "parted")


@pytest.mark.parametrize("argument", ["--parted.part=auto", "--parted.other=auto", "--parted=auto", "--model=auto"])
def test_no_value_of_a_subclass_is_opened_as_a_file(desk: Path, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(desk))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    Path("auto").write_text("{class_path: evil.Evil}")
    Path("evil.py").write_text("open('canary', 'w').close()\nclass Evil: ...\n")
    with suppress(UserError, SystemExit):
        WithParts([*ONE_STEP, argument, "--print_config"])
    assert not Path("canary").exists()


def test_help_shows_what_a_subclass_adds(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        Linked(["fit", "--help", "all"])
    shown = capsys.readouterr().out
    for part in ("--layers LAYERS", "How many layers.", "--early_stopping.patience", "--model.hidden_size", "--resume"):
        assert part in shown
    assert "Path to a configuration file" not in shown


SPEAKING = """
import lightning as L

class Speaks(L.Callback):
    def __init__(self, words: str = "a", often: int = 1):
        self.words, self.often = words, often

    def on_train_end(self, trainer, pl_module):
        print(self.words * self.often)
"""


@pytest.mark.parametrize(
    "how",
    [
        {"class_path": "speaking.Speaks", "init_args": {"words": "so ", "often": 2}},
        [{"class_path": "speaking.Speaks", "init_args": {"words": "so "}}, "DeviceStatsMonitor"],
    ],
)
def test_callbacks_of_a_config(command: Command, desk: Path, how: Any) -> None:
    (desk / "speaking.py").write_text(SPEAKING)
    Path("callbacks.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": how}}))
    done = command(*ONE_STEP, "--config=callbacks.yaml").ok()
    assert "so " in done.out


@pytest.mark.parametrize("name", ["EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"])
def test_a_callback_and_then_its_arguments(command: Command, desk: Path, name: str) -> None:
    options = (f"--trainer.callbacks+={name}", "--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=9")
    done = command(*ONE_STEP, "--trainer.callbacks=DeviceStatsMonitor", *options, "--print_config").ok()
    _, early = yaml.safe_load(done.out)["trainer"]["callbacks"]
    assert early["class_path"] == "lightning.pytorch.callbacks.EarlyStopping"
    assert (early["init_args"]["monitor"], early["init_args"]["patience"]) == ("val_loss", 9)


def test_the_config_of_a_resumed_run_is_printed(command: Command, desk: Path, finished: Path) -> None:
    printed = command("fit", f"--resume={finished}/runs/done", "--trainer.max_steps=9", "--print_config").ok()
    config = yaml.safe_load(printed.out)
    assert (config["trainer"]["max_steps"], config["model"]["hidden_size"]) == (9, 32)


def test_a_vocabulary_size_is_a_key(command: Command, desk: Path) -> None:
    command(*ONE_STEP, "--model.vocab_size=600").ok()
    assert yaml.safe_load(Path("runs/r/config.yaml").read_text())["model"]["vocab_size"] == 600


def test_the_folder_is_claimed_before_anything_is_built(command: Command, desk: Path) -> None:
    assert command(*ONE_STEP).code == 0
    done = command(*ONE_STEP, "--data.path=missing.txt")
    assert done.err.startswith("error: run: runs/r exists already; ")
    wrong = command(*ONE_STEP[:-1], "--run=other", "--data.path=missing.txt")
    assert "missing.txt does not exist" in wrong.err
    assert not Path("runs/other").exists()
