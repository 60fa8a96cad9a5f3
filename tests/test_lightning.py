"""What people who know Lightning expect of `trainer`: each of its keys is honoured, or refused in one sentence."""

import json
from pathlib import Path

import pytest

from .commands import FIT, Command, run_process

CALLBACKS = "lightning.pytorch.callbacks"
STRATEGIES = "lightning.pytorch.strategies"
SPEAKER = """
import lightning as L

class Speaker(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.print("step", trainer.global_step, sep=" no. ")
"""
REFUSED = {
    "gradient_clip_val=1": "trainer.gradient_clip_val: 1 is not possible here; set optim.gradient_clip instead",
    "gradient_clip_algorithm=value": "trainer.gradient_clip_algorithm: value is not possible here; optim.gradient_clip",
    "barebones=true": "trainer.barebones: True is not possible here; set enable_checkpointing, ",
    "reload_dataloaders_every_n_epochs=1": "trainer.reload_dataloaders_every_n_epochs: 1 is not possible here; ",
    "overfit_batches=1": "trainer.overfit_batches is 1, but the training data is an endless stream; to overfit, ",
    "default_root_dir=s3://bucket/runs": "trainer.default_root_dir: s3://bucket/runs is a URL, but runs are written ",
    "strategy=zoo.train.fsdp2.FSDP2": "trainer.strategy: zoo.train.fsdp2.FSDP2 is a class; write --trainer.strategy.cl",
    f"strategy.class_path={STRATEGIES}.ModelParallelStrategy": "trainer.strategy: ModelParallelStrategy is not "
    "possible here; use zoo.train.fsdp2.FSDP2, as train/fsdp.yaml does",
    "strategy=ddp_spawn_find_unused_parameters_true": "trainer.strategy: ddp_spawn_find_unused_parameters_true is not ",
    "strategy=deepspeed": "trainer.strategy: DeepSpeedStrategy is not possible here; use zoo.train.zero.Zero, as ",
    "plugins=AsyncCheckpointIO": "trainer.plugins: AsyncCheckpointIO is not possible here; set checkpoints.in_backgr",
    "callbacks+=LearningRateFinder": "trainer.callbacks: LearningRateFinder is not possible here; sweep optim.learning",
    "callbacks=ModelCheckpoint|trainer.callbacks.mode=middle|trainer.callbacks.monitor=val_loss": "trainer: `mode` can "
    "be min, max but got middle",
    "val_check_interval=0.5": "trainer: `val_check_interval` should be an integer or a time-based duration",
}


@pytest.fixture
def speaker(desk: Path) -> tuple[str, ...]:
    """A command with a callback that calls `pl_module.print` in each step."""
    (desk / "speaker.py").write_text(SPEAKER)
    return (*FIT, "--trainer.callbacks+=speaker.Speaker", "--run=r")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("--trainer.enable_progress_bar=false",), (f"--trainer.callbacks+={CALLBACKS}.TQDMProgressBar",)],
    ids=["ours", "none", "lightnings"],
)
def test_a_callback_prints_whatever_the_progress_bar(
    command: Command, speaker: tuple[str, ...], options: tuple[str, ...]
):
    done = command(*speaker, *options).ok()
    said = done.out + done.err  # a tqdm bar may be on either
    assert all(f"step no. {step}" in said for step in (1, 2, 3, 4))
    assert ("training" in done.err) == (options == ())  # our bar


def test_our_bar_is_lightnings():
    """So that what Lightning and its users call on a bar is there."""
    from lightning.pytorch.callbacks import TQDMProgressBar

    from zoo.train.callbacks.progress_bar import Progress

    assert issubclass(Progress, TQDMProgressBar)


@pytest.mark.slow
def test_no_checkpoints_no_logger_no_summary(command: Command, desk: Path):
    off = ("enable_checkpointing", "logger", "enable_model_summary")
    done = command(*FIT, *(f"--trainer.{key}=false" for key in off), "--run=r").ok()
    assert not (desk / "runs" / "r" / "checkpoints").exists()
    assert not (desk / "runs" / "r" / "metrics.jsonl").exists()
    assert "whole model" not in done.out
    assert json.loads((desk / "runs" / "r" / "results.json").read_text())["status"] == "complete"
    assert "next:" not in done.out  # nothing can be loaded


@pytest.mark.slow
def test_a_table_of_lightnings_takes_the_place_of_ours(command: Command, desk: Path):
    done = command(*FIT, f"--trainer.callbacks={CALLBACKS}.ModelSummary", "--trainer.max_steps=1", "--run=r").ok()
    assert "whole model" not in done.out


@pytest.mark.slow
def test_runs_lie_in_the_root_dir(command: Command, desk: Path):
    command(*FIT, "--trainer.default_root_dir=elsewhere", "--run=r", "--trainer.max_steps=1").ok()
    assert (desk / "elsewhere" / "r" / "checkpoints" / "last.ckpt").is_file()
    assert not (desk / "runs").exists()
    assert command("fit", "--resume=elsewhere/r", "--trainer.max_steps=2").code == 0


@pytest.mark.slow
def test_the_table_of_a_profiler_is_shown(desk: Path, shared_cache: Path):
    profiled = (*FIT, "--trainer.profiler=simple", "--trainer.max_steps=1")
    done = run_process(desk, shared_cache, *profiled, timeout=120, COLUMNS="200").ok()
    assert "FIT Profiler Report" in done.out + done.err
    assert "run_training_epoch" in done.out + done.err


@pytest.mark.slow
def test_epochs_give_the_schedule_its_length(command: Command, desk: Path):
    """Two epochs of a cosine; continued within the second, it ends as the run that was never stopped."""
    epochs = ("--trainer.limit_train_batches=2", "--trainer.max_steps=-1", "--trainer.max_epochs=2")
    command(*FIT, *epochs, "--optim.warmup_steps=1", "--checkpoints.keep_every_n_steps=1", "--run=whole").ok()
    rows = [json.loads(line) for line in (desk / "runs/whole/metrics.jsonl").read_text().splitlines()]
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert rates[0] == rates[1] > rates[2] > rates[3]
    results = json.loads((desk / "runs/whole/results.json").read_text())
    assert (results["steps"], results["decay_starts"]) == (4, 1)
    checkpoint = desk / "runs/whole/checkpoints/step-00000003.ckpt"
    (desk / "runs/again/checkpoints").mkdir(parents=True)
    checkpoint.rename(desk / "runs/again/checkpoints/last.ckpt")
    assert command("fit", "--ckpt_path=runs/again").code == 0
    repeated = json.loads((desk / "runs/again/results.json").read_text())
    assert (repeated["steps"], repeated["val_loss"]) == (4, results["val_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "split"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_ckpt_path_is_the_checkpoint(command: Command, finished: Path, verb: str, split: str):
    run = str(finished / "runs" / "done")
    done = command(verb, "--ckpt_path", run, f"--trainer.limit_{split}_batches=1")
    if verb == "test":  # this run kept no documents for it
        assert "data.test_fraction is null" in done.err
        return
    assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_honoured_is_refused(command: Command, setting: str):
    if setting == "strategy=deepspeed":
        pytest.importorskip("deepspeed")
    done = command(*FIT, *(f"--{each}" for each in f"trainer.{setting}".split("|"))).refused()
    assert done.err.splitlines()[-1].startswith(f"error: {REFUSED[setting]}")


def test_every_key_is_honoured_or_refused():
    """A key that a new Lightning adds is looked at."""
    import inspect

    import lightning as L

    honoured = {
        *("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "fast_dev_run"),
        *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "limit_train_batches", "limit_val_batches"),
        *("limit_test_batches", "limit_predict_batches", "val_check_interval", "check_val_every_n_epoch"),
        *("num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar", "profiler"),
        *("enable_model_summary", "accumulate_grad_batches", "deterministic", "benchmark", "inference_mode"),
        *("use_distributed_sampler", "detect_anomaly", "plugins", "sync_batchnorm", "default_root_dir"),
        *("enable_autolog_hparams", "model_registry"),
    }
    refused = {setting.partition("=")[0] for setting in REFUSED}
    keys = {*inspect.signature(L.Trainer.__init__).parameters} - {"self"}
    assert keys == honoured | (refused & keys)


@pytest.mark.slow
def test_a_fraction_of_an_epoch(command: Command, desk: Path):
    """On the command line, too, where everything is text."""
    half = (
        "--trainer.val_check_interval=0.5",
        "--trainer.check_val_every_n_epoch=1",
        "--trainer.limit_train_batches=4",
    )
    command(*FIT, *half, "--run=r").ok()
    rows = [json.loads(line) for line in (desk / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [1, 3]  # after two steps and after four


@pytest.mark.slow
def test_a_callback_whose_defaults_are_names(command: Command, desk: Path):
    """`Timer` has a member of an enumeration as a default, which the run's config must hold."""
    command(*FIT, f"--trainer.callbacks={CALLBACKS}.Timer", "--trainer.max_steps=1", "--run=r").ok()
    assert "interval: step" in (desk / "runs/r/config.yaml").read_text()
