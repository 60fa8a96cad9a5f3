"""Loggers by config: in the run's folder, continued with it, told in one sentence where a package is missing."""

import csv
from pathlib import Path

import pytest
import yaml

from zoo.config.find import CONFIGS
from zoo.config.parser import read
from zoo.runs.build import for_run
from zoo.train.metrics_file import read_metrics

from .commands import FIT, Command

STAND_IN = """
import json
from pathlib import Path
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

class StandIn(Logger):
    def __init__(self, save_dir: str, name: str, version: str = ""):
        super().__init__()
        self.folder, self._name, self._version = Path(save_dir), name, version

    name = property(lambda self: self._name)
    version = property(lambda self: self._version)

    @rank_zero_only
    def log_hyperparams(self, params):
        self._add({"config": params})

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self._add({"step": step, **metrics})

    def _add(self, row):
        with open(self.folder / f"{self.name}.log", "a") as file:
            file.write(json.dumps(row) + chr(10))

class NeedsMore(StandIn):
    def __init__(self, save_dir: str, name: str, version: str = ""):
        raise ModuleNotFoundError("Requirement 'more>=1' not met. HINT: Try running `pip install -U 'more>=1'`")
"""


@pytest.fixture
def logger_config(desk: Path) -> Path:
    (desk / "stand_in_logger.py").write_text(STAND_IN)
    init = {"save_dir": "{run}", "name": "log-of-{name}"}
    logger = {"class_path": "stand_in_logger.StandIn", "init_args": init}
    (desk / "logger.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    return desk


@pytest.mark.slow
def test_a_logger_lies_in_the_run_and_is_continued(logger_config: Path, command: Command):
    command(*FIT, "--config", "logger.yaml", "--run", "one", "--trainer.max_steps=2").ok()
    log = logger_config / "runs" / "one" / "log-of-one.log"
    first, *rows = map(yaml.safe_load, log.read_text().splitlines())
    assert first["config"]["trainer"]["logger"]["init_args"]["save_dir"] == "{run}"  # of any run
    assert [row["step"] for row in rows if "train_loss" in row] == [0, 1]
    assert command("fit", "--resume", "one", "--trainer.max_steps=3").code == 0
    rows = list(map(yaml.safe_load, log.read_text().splitlines()))
    assert [row["step"] for row in rows if "train_loss" in row] == [0, 1, 2]
    before = log.read_text()
    assert command("validate", "--checkpoint", "runs/one").code == 0  # the run's logger is for training
    assert log.read_text() == before
    named = ("--config", "logger.yaml", "--trainer.logger.name=validation")  # one for the validation is its own
    assert command("validate", "--checkpoint", "runs/one", *named).code == 0
    assert "val_loss" in (logger_config / "runs" / "one" / "validation.log").read_text()
    assert log.read_text() == before
    assert not list(logger_config.glob("{run}*"))
    command("fit", "--config", "runs/one/config.yaml", "--run", "two", "--trainer.max_steps=1").ok()
    assert (logger_config / "runs" / "two" / "log-of-two.log").is_file()
    with open(logger_config / "runs" / "one" / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    expected = read_metrics(logger_config / "runs" / "one" / "metrics.jsonl")
    assert [int(row["step"]) for row in table] == [row["step"] for row in expected] == [0, 1, 2]  # with its validations
    for name in ("train_loss", "val_loss"):
        assert [row[name] for row in table] == ["" if name not in row else str(row[name]) for row in expected]


@pytest.mark.slow
def test_a_missing_package_is_one_sentence(logger_config: Path, command: Command):
    wrong = "--trainer.logger.class_path=stand_in_logger.NeedsMore"
    said = command(*FIT, "--config", "logger.yaml", wrong, "--run", "one").sentence()
    assert "trainer.logger: Requirement 'more>=1' not met; install the loggers' packages with pip" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_the_overlays_name_the_run(name: str):
    config = for_run(read("gdn_h2.yaml", f"train/{name}.yaml"), Path("runs/first"))
    arguments = config.trainer.logger.init_args
    assert arguments.save_dir == "runs/first"
    assert name == "tensorboard" or (arguments.name, arguments.id) == ("first", "first")
    assert "{" not in str(vars(arguments).values())
    assert f"--config train/{name}.yaml" in (CONFIGS / "train" / f"{name}.yaml").read_text()


def test_tensorboard_itself(desk: Path, command: Command):
    pytest.importorskip("tensorboard", reason="install the extra 'loggers'")
    command(*FIT, "--config", "train/tensorboard.yaml", "--run", "one").ok()
    assert list((desk / "runs" / "one" / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_the_profiler_of_lightning_writes_into_the_run(command: Command, desk: Path):
    run = (*FIT, "--config", "train/profile.yaml", "--trainer.max_steps=6", "--run", "profiled")
    assert command(*run).code == 0
    assert (desk / "runs/profiled/fit-profile.txt").read_text()
    assert list((desk / "runs/profiled").glob("fit-profile*.json"))
    done = command(*FIT, "--run", "profiled", "--overwrite")  # these are files of a run
    assert done.code == 0, done.err
