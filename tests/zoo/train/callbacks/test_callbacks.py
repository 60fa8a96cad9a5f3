import errno
import json
import math
import os
import signal
import threading

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from matplotlib.image import imread

from kernels.errors import UserError
from tests.zoo.tiny import (
    VOCAB,
    At,
    Batches,
    ByteTokenizer,
    Data,
    LossLog,
    TinyModel,
    press_ctrl_c,
    pretraining,
    trainer,
    validation_loader,
)
from zoo.checkpoints.format import read_checkpoint
from zoo.checkpoints.io import AtomicCheckpointIO
from zoo.data import MarkovChain
from zoo.display import write_figure
from zoo.files.atomic import atomic_link, atomic_write
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.callbacks.loss_curve import LossCurve
from zoo.train.callbacks.result_row import ResultRow
from zoo.train.callbacks.samples import Samples
from zoo.train.callbacks.throughput import Throughput
from zoo.train.callbacks.validations import Validations
from zoo.train.devices import peak_flops, peak_memory
from zoo.train.metrics_file import MetricsFile, read_metrics
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation
from zoo.train.results import result_table


def saved_step(path):
    return read_checkpoint(path)["global_step"]


# writing


def test_a_link_keeps_its_content_when_the_source_is_replaced(tmp_path):
    for content in (b"first", b"second"):
        with atomic_write(tmp_path / "last") as file:
            file.write(content)
        if content == b"first":
            atomic_link(tmp_path / "last", tmp_path / "best")
    assert (tmp_path / "best").read_bytes() == b"first"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_a_checkpoint_survives_a_failure_in_the_middle_of_the_next(number, tmp_path, monkeypatch):
    real = torch.save

    def fails_half_way(checkpoint, file):
        if checkpoint["global_step"] == 6:
            file.write(b"half a checkpoint")
            raise OSError(number, os.strerror(number))
        real(checkpoint, file)

    monkeypatch.setattr(torch, "save", fails_half_way)
    with pytest.raises(UserError, match=f"cannot be written: {os.strerror(number)}; the one saved there before"):
        trainer(tmp_path, val_check_interval=40).fit(pretraining(), Data())
    assert saved_step(tmp_path / "checkpoints" / "last.ckpt") == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


# checkpoints


def test_a_checkpoint_is_written_once_around_a_validation(tmp_path, monkeypatch):
    written, save = [], AtomicCheckpointIO.save_checkpoint

    def noted(self, checkpoint, *args, **options):
        written.append(checkpoint["global_step"])
        save(self, checkpoint, *args, **options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", noted)
    trainer(tmp_path, checkpoints=Checkpoints(every_n_steps=4), max_steps=10).fit(pretraining(), Data())
    assert written == [4, 8, 10]


def test_a_validation_without_batches_postpones_no_checkpoint(tmp_path):
    class Unvalidated(Data):
        def val_dataloader(self):
            return Batches()

    saving = Checkpoints(every_n_steps=4, keep_every_n_steps=4)
    trainer(tmp_path, checkpoints=saving, max_steps=10).fit(pretraining(), Unvalidated())
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "step-00000004.ckpt", "step-00000008.ckpt"}


def test_an_exception_in_a_validation_loses_no_step(tmp_path):
    class Fails(L.Callback):
        def on_validation_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                raise RuntimeError("out of memory")

    saving = Checkpoints(every_n_steps=4, keep_every_n_steps=4)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(tmp_path, [Fails()], checkpoints=saving).fit(pretraining(), Data())
    folder = tmp_path / "checkpoints"
    assert saved_step(folder / "last.ckpt") == saved_step(folder / "step-00000004.ckpt") == 4


def test_last_best_and_kept_checkpoints(tmp_path):
    run = trainer(tmp_path, checkpoints=(kept := Checkpoints(every_n_steps=5, keep_every_n_steps=6)), max_steps=14)
    run.fit(pretraining(), Data())
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "step-00000006.ckpt",
        "step-00000012.ckpt",
    ]
    assert saved_step(folder / "last.ckpt") == 14
    assert saved_step(folder / "best.ckpt") in (4, 8, 12)
    assert saved_step(folder / "step-00000006.ckpt") == 6
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "val_loss" in row]
    assert kept.best_model_score == pytest.approx(min(row["val_loss"] for row in rows))
    (result,) = run.validate(ckpt_path="best", datamodule=Data(), verbose=False)
    assert result["val_loss"] == pytest.approx(kept.best_model_score)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_a_disk_that_is_really_full(tmp_path, monkeypatch):
    """PyTorch's own writer notices at any of its many writes, and when it closes the archive."""
    monkeypatch.setattr("zoo.checkpoints.io.atomic_write", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(UserError, match="cannot be written: No space left on device; none was saved there before"):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(1 << 20)}, tmp_path / "last.ckpt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_becomes_read_only(tmp_path):
    trainer(tmp_path, max_steps=4).fit(pretraining(), Data())
    folder = tmp_path / "checkpoints"
    folder.chmod(0o500)
    try:
        with pytest.raises(UserError, match="cannot be written"):
            trainer(tmp_path).fit(pretraining(), Data(), ckpt_path=folder / "last.ckpt")
    finally:
        folder.chmod(0o700)
    assert saved_step(folder / "last.ckpt") == 4


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(every_n_steps=50, keep_every_n_steps=2, keep_last=3)
    trainer(tmp_path, checkpoints=checkpoints, val_check_interval=40).fit(pretraining(), Data())
    kept = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [saved_step(path) for path in kept] == [8, 10, 12]
    assert saved_step(tmp_path / "checkpoints" / "last.ckpt") == 12


class SometimesNaN(TinyModel):
    """Its first validations give NaN."""

    def __init__(self, bad_validations: int) -> None:
        super().__init__()
        self.left, self.was_training = bad_validations, True

    def logits(self, x):
        if self.was_training and not self.training:
            self.left -= 1
        self.was_training = self.training
        return super().logits(x) * (math.nan if not self.training and self.left >= 0 else 1.0)


def test_any_finite_loss_is_better_than_nan(tmp_path):
    module = Pretraining(SometimesNaN(2), Optimisation(learning_rate=1e-2), config={"model": {"hidden_size": 8}})
    run = trainer(tmp_path, checkpoints=(kept := Checkpoints()), num_sanity_val_steps=0)
    run.fit(module, Data())
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "val_loss" in row]
    assert [row["val_loss"] is None for row in rows] == [True, True, False]
    assert kept.best_model_score == pytest.approx(rows[-1]["val_loss"])
    assert saved_step(tmp_path / "checkpoints" / "best.ckpt") == 12


def test_a_run_that_only_has_nan_has_no_best(tmp_path):
    module = Pretraining(SometimesNaN(9), Optimisation(learning_rate=1e-2), config={"model": {"hidden_size": 8}})
    trainer(tmp_path, checkpoints=(kept := Checkpoints()), num_sanity_val_steps=0).fit(module, Data())
    assert kept.best_model_score is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_validation_before_the_first_step_keeps_nothing(tmp_path):
    """The first of them is in the middle of the first step's gradient accumulation."""
    run = trainer(tmp_path, val_check_interval=2, accumulate_grad_batches=4, max_steps=3)
    run.fit(pretraining(), Data())
    assert saved_step(tmp_path / "checkpoints" / "best.ckpt") > 0
    losses = [row["val_loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if "val_loss" in row]
    assert len(losses) >= 3


def test_the_smoothed_curve_goes_on_after_nan():
    curve = LossCurve()
    curve.training = [(1, 2.0), (2, math.nan), (3, 2.0), (4, 2.0)]
    smoothed = curve.figure().axes[0].lines[1].get_ydata()
    assert smoothed[2:] == pytest.approx([2.0, 2.0])


def test_only_checkpoints_of_the_run_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mine = {"step-0-paper.ckpt", "step-2.ckpt", "step-000000004.ckpt", "step-00000004.ckpt.bak", "step-best.ckpt"}
    for name in mine:
        (folder / name).write_text("mine")
    (folder / "step-00000000.ckpt").symlink_to(folder / "step-2.ckpt")
    (folder / "step-100000000.ckpt").write_text("a later step")
    (folder / "step-99999999.ckpt").write_text("an earlier one, with a name that sorts behind")
    checkpoints = Checkpoints(every_n_steps=50, keep_every_n_steps=2, keep_last=2)
    trainer(tmp_path, checkpoints=checkpoints, val_check_interval=40).fit(pretraining(), Data())
    remaining = {path.name for path in folder.glob("step-*")}
    assert remaining == mine | {"step-00000000.ckpt", "step-00000012.ckpt", "step-100000000.ckpt"}
    assert saved_step(folder / "step-00000012.ckpt") == 12


def test_the_clock_saves_too(tmp_path, monkeypatch):
    minutes = iter(range(1000))
    monkeypatch.setattr("zoo.train.callbacks.checkpoints.time.monotonic", lambda: 60.0 * next(minutes))
    saved = []

    class Watch(L.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            saved.append(checkpoint["global_step"])

    checkpoints = Checkpoints(every_n_steps=50, every_n_minutes=3)
    trainer(tmp_path, [Watch()], checkpoints=checkpoints, val_check_interval=40).fit(pretraining(), Data())
    assert saved == [4, 8, 12]  # the clock is asked once a step, and when a checkpoint is written


@pytest.mark.parametrize("wrong", [{"every_n_minutes": 0}, {"keep_last": 0}, {"every_n_steps": 0}], ids=str)
def test_counts_below_one(wrong):
    with pytest.raises(UserError, match=rf"^checkpoints\.{next(iter(wrong))} is 0, but must be"):
        Checkpoints(**wrong)


def test_a_resumed_run_remembers_the_best(tmp_path):
    trainer(tmp_path, max_steps=8).fit(pretraining(), Data())
    best = saved_step(tmp_path / "checkpoints" / "best.ckpt")
    run = trainer(tmp_path, checkpoints=(kept := Checkpoints()), max_steps=12)
    kept_before = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["callbacks"]["Checkpoints"]
    module = pretraining(learning_rate=1e-9)
    run.fit(module, Data(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert kept.best_model_score <= kept_before["best_model_score"]
    assert saved_step(tmp_path / "checkpoints" / "best.ckpt") in (best, 12)


def test_ctrl_c_finishes_the_step_saves_it_and_says_how_to_continue(tmp_path, capfd):
    with pytest.raises(SystemExit):
        trainer(tmp_path, [log := LossLog(), At(5, press_ctrl_c)]).fit(pretraining(), Data())
    assert list(log.losses) == [1, 2, 3, 4, 5]
    assert saved_step(tmp_path / "checkpoints" / "last.ckpt") == 5
    error = capfd.readouterr().err
    assert "Stopping when this step is done and saved" in error
    assert f"step 5 is saved in {tmp_path}/checkpoints. Continue with: python cli.py fit --resume {tmp_path}" in error
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_second_ctrl_c_ends_at_once_and_keeps_the_last_checkpoint(tmp_path):
    def impatient():
        press_ctrl_c()
        press_ctrl_c()

    with pytest.raises(SystemExit):
        trainer(tmp_path, [log := LossLog(), At(5, impatient)]).fit(pretraining(), Data())
    assert list(log.losses) == [1, 2, 3, 4]
    assert saved_step(tmp_path / "checkpoints" / "last.ckpt") == 4


def test_ctrl_c_in_the_last_step_lets_the_run_complete(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trainer(tmp_path, [At(12, press_ctrl_c), ResultRow()]).fit(pretraining(), Data())
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "complete"
    assert signal.getsignal(signal.SIGINT) is before


def test_steps_are_counted_when_gradients_are_accumulated(tmp_path):
    with pytest.raises(SystemExit):
        trainer(tmp_path, [At(5, press_ctrl_c)], accumulate_grad_batches=2).fit(pretraining(), Data())
    checkpoint = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == 5
    assert checkpoint["zoo"]["tokens_seen"] == 5 * 2 * 64  # both halves of the step


def test_training_outside_the_main_thread(tmp_path):
    thread = threading.Thread(target=lambda: trainer(tmp_path, max_steps=3).fit(pretraining(), Data()))
    thread.start()
    thread.join()
    assert saved_step(tmp_path / "checkpoints" / "last.ckpt") == 3


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("in the way")
    run = trainer(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be created"):
        run.fit(pretraining(), Data())


# metrics, results, curve


def test_a_resumed_run_continues_its_metrics(tmp_path):
    trainer_options = {"checkpoints": Checkpoints(every_n_steps=3), "val_check_interval": 40}
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(tmp_path, [At(6, RuntimeError("power cut"))], **trainer_options).fit(pretraining(), Data())
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "train_l')  # killed while writing
    trainer(tmp_path).fit(pretraining(), Data(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    assert all({"train_loss", "learning_rate", "gradient_norm", "tokens"} <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "val_loss" in row] == [3, 7, 11]
    assert rows[7]["val_perplexity"] == pytest.approx(math.exp(rows[7]["val_loss"]), rel=1e-5)


def test_values_that_are_not_finite_are_null(tmp_path):
    MetricsFile(tmp_path).log_metrics({"train_loss": float("nan"), "x": 1.0}, step=0)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "train_loss": None, "x": 1.0}]


def test_result_row_of_a_complete_run(tmp_path, capsys):
    L.seed_everything(7, verbose=False)
    folder = tmp_path / "my-run"
    module = pretraining(learning_rate=5e-2)
    run = trainer(folder, [Throughput(), ResultRow()], max_steps=12)
    run.fit(module, Data())
    row = json.loads((folder / "results.json").read_text())
    same = {"run": "my-run", "status": "complete", "steps": 12, "tokens_seen": 12 * 64, "bigram_loss": 1.25, "seed": 7}
    assert {name: row[name] for name in same} == same
    assert row["parameters"] == TinyModel().num_parameters()
    assert (row["state_size"], row["forward_flops_per_token"], row["context_length"]) == (8, 1000, 16)
    assert (row["precision"], row["torch"], row["devices"]) == ("32-true", torch.__version__, 1)
    assert row["val_loss"] == pytest.approx(run.callback_metrics["val_loss"].item())
    assert row["val_loss"] == pytest.approx(sum(row["val_loss_by_position"]) / 8, rel=1e-5)
    assert row["val_loss_same_batches"] == pytest.approx(row["val_loss"], rel=1e-5)  # there are two batches
    with module.model.without_mixers():
        logits = [module.model(batch.tokens)[0] for batch in validation_loader()]
    labels = torch.cat([batch.labels for batch in validation_loader()])
    zeroed = torch.nn.functional.cross_entropy(torch.cat(logits).flatten(0, 1), labels.flatten())
    assert row["val_loss_mixers_zeroed"] == pytest.approx(zeroed.item(), rel=1e-5)
    assert row["tokens_per_second"] > 0
    assert row["tokens_per_second_by_clock"] > 11 * 64 / (row["wall_seconds"] + 0.05)  # which is rounded
    shown = capsys.readouterr().out
    lines = ("interpolated bigram model", "1.250", "validation, first batches only", "first batches, all mixers zeroed")
    speed = f"{row['tokens_per_second_by_clock']:,.0f} tokens/s by the clock"
    for text in ("my-run: 12 steps", speed, *lines):
        assert text in shown


def test_result_row_of_an_interrupted_and_then_continued_run(tmp_path):
    with pytest.raises(SystemExit):
        trainer(tmp_path, [ResultRow(), At(6, press_ctrl_c)]).fit(pretraining(), Data())
    row = json.loads((tmp_path / "results.json").read_text())
    assert (row["status"], row["steps"], row["tokens_seen"]) == ("interrupted", 6, 6 * 64)
    assert row["val_loss"] is not None  # of step 4
    first_seconds = row["wall_seconds"]
    last = tmp_path / "checkpoints" / "last.ckpt"
    trainer(tmp_path, [ResultRow()]).fit(pretraining(), Data(), ckpt_path=last)
    row = json.loads((tmp_path / "results.json").read_text())
    assert (row["status"], row["steps"], row["tokens_seen"]) == ("complete", 12, 12 * 64)
    assert row["wall_seconds"] >= first_seconds
    content = (tmp_path / "results.json").read_text()
    trainer(tmp_path, [ResultRow()]).fit(pretraining(), Data(), ckpt_path=last)  # nothing left to do
    assert (tmp_path / "results.json").read_text() == content


def test_result_row_of_a_failed_run(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"):
        trainer(tmp_path, [ResultRow(), At(6, RuntimeError("a bug"))]).fit(pretraining(), Data())
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "failed"


def test_the_table_leaves_out_what_is_not_known():
    row = {"run": "r", "steps": 1, "tokens_seen": 2, "val_loss": 2.0, "val_loss_by_position": [3.0, None]}
    row |= {"bigram_loss": None, "val_loss_same_batches": None, "val_loss_mixers_zeroed": None}
    assert result_table(row).row_count == 3


@pytest.mark.slow
def test_the_curve_is_drawn_and_continued(tmp_path):
    trainer(tmp_path, [LossCurve(every_n_steps=2)], max_steps=6).fit(pretraining(), Data())
    last = tmp_path / "checkpoints" / "last.ckpt"
    trainer(tmp_path, [curve := LossCurve(every_n_steps=2)]).fit(pretraining(), Data(), ckpt_path=last)
    assert [tokens for tokens, _ in curve.training] == [64 * step for step in (2, 4, 6, 8, 10, 12)]
    assert [tokens for tokens, _ in curve.validation] == [64 * step for step in (4, 8, 12)]
    (axes,) = curve.figure(1.25).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "training, smoothed", "validation", "interpolated bigram model"]
    assert list(axes.lines[0].get_ydata()) == [loss for _, loss in curve.training]
    assert set(axes.lines[3].get_ydata()) == {1.25}
    assert imread(tmp_path / "loss.png").shape[:2] == (504, 840)


def test_the_curve_has_the_losses_of_its_steps(tmp_path):
    """The curve has them whether or not they are logged."""
    trainer(tmp_path, [log := LossLog(), curve := LossCurve(every_n_steps=3)], log_every_n_steps=5).fit(
        pretraining(), Data()
    )
    assert curve.training == [(64 * step, pytest.approx(log.losses[step], rel=1e-6)) for step in (3, 6, 9, 12)]


def test_the_curve_has_one_loss_a_step_of_several_batches(tmp_path):
    curve = LossCurve(every_n_steps=2)
    trainer(tmp_path, [curve], max_steps=4, accumulate_grad_batches=3).fit(pretraining(), Data())
    assert [tokens for tokens, _ in curve.training] == [3 * 64 * step for step in (2, 4)]


@pytest.mark.slow
def test_the_curve_is_written_while_training_continues(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Each picture once, and the last one before the end of the run; the losses are read for it, not before."""
    steps, written, read = threading.Event(), list[bool](), list[int]()
    curve = LossCurve(every_n_steps=1)

    class Steps(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            read.append(len(curve.training))
            if trainer.global_step == 6:
                steps.set()

    def slow(*args: object) -> None:
        written.append(steps.wait(60))
        write_figure(*args)

    monkeypatch.setattr("zoo.train.callbacks.loss_curve.write_figure", slow)
    trainer(tmp_path, [Steps(), curve], max_steps=8, val_check_interval=4).fit(pretraining(), Data())
    assert written == [True, True]
    assert read[:3] == [0, 0, 0]
    assert imread(tmp_path / "loss.png").shape[:2] == (504, 840)


# speed and samples


def test_throughput_reaches_the_metrics(tmp_path):
    trainer(tmp_path, [Throughput(window=3)]).fit(pretraining(), Data())
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert all(row["tokens_per_second"] > 0 and row["seconds_per_step"] > 0 for row in rows)
    assert rows[-1]["minutes_left"] == 0
    assert rows[5]["tokens_per_second"] * rows[5]["seconds_per_step"] == pytest.approx(64, rel=1e-4)
    assert "mfu" not in rows[5]  # nobody knows the peak of this machine


def test_peak_memory_reaches_the_metrics(tmp_path):
    if peak_memory(torch.device("cpu")) is None:
        pytest.skip("nobody counts it here")
    before = peak_memory(torch.device("cpu"))
    trainer(tmp_path, [Throughput()], max_steps=6, log_every_n_steps=2).fit(pretraining(), Data())
    found = [row["peak_memory_gib"] for row in read_metrics(tmp_path / "metrics.jsonl") if "peak_memory_gib" in row]
    assert len(found) == 3
    assert before / 2**30 <= found[0] <= found[-1]
    assert 0.05 < found[-1] < 100
    assert peak_memory(torch.device("meta")) is None
    block = torch.ones(1 << 28, dtype=torch.uint8)  # 256 MiB, touched
    assert peak_memory(torch.device("cpu")) >= len(block)


def test_utilisation_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.train.callbacks.throughput.peak_flops", lambda device: 1e9)
    trainer(tmp_path, [Throughput()]).fit(pretraining(), Data())
    row = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert row["mfu"] == pytest.approx(3 * 1000 * row["tokens_per_second"] / 1e9, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40S", 362e12), ("Somebody's GPU", None)],
)
def test_peaks_by_device_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None


def test_samples_are_written_at_each_validation_and_disturb_nothing(tmp_path, capsys):
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = 0
    tokenizer.encode = lambda text: [1] * len(text)
    tokenizer.decode = lambda ids: "".join(chr(ord("a") + i) for i in ids)
    with_samples, without = LossLog(), LossLog()
    L.seed_everything(1, verbose=False)
    samples = Samples(prompts=["hi", ""], max_new_tokens=5)
    trainer(tmp_path, [with_samples, samples]).fit(pretraining(0.2, tokenizer), Data())
    L.seed_everything(1, verbose=False)
    trainer(tmp_path / "other", [without]).fit(pretraining(0.2), Data())
    text = (tmp_path / "samples.txt").read_text()
    assert [text.count(f"sample after {step} steps") for step in (4, 8, 12)] == [2, 2, 2]
    assert "\nhi" in text
    assert "sample after 12 steps" in capsys.readouterr().out
    assert with_samples.losses == without.losses


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 7.0), ("temperature", -1.0), ("max_new_tokens", 0), ("seed", 10**30)]
)
def test_settings_of_samples_are_checked_before_training(name: str, value: float):
    with pytest.raises(UserError, match=rf"^samples\.{name} is .*, but must be"):
        Samples(**{name: value})


@pytest.mark.parametrize(("steps", "expected"), [(6, [4, 6]), (8, [4, 8])])
def test_a_run_ends_with_one_validation_of_its_last_step(tmp_path, steps, expected):
    """Between two validations (every 4 steps) one more is made; at one of them it is not made twice."""
    seen = []

    class Watch(Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                seen.append(trainer.global_step)

    fitted = trainer(tmp_path, [Validations(), Watch()], max_steps=steps)
    fitted.fit(pretraining(), Data())
    assert seen == expected
    assert fitted.callback_metrics["val_loss"].isfinite()


# whole steps


@pytest.mark.slow
@pytest.mark.parametrize("at", range(2, 9))
def test_accumulated_gradients_are_never_half_of_a_step(at, tmp_path):
    """Three batches make a step, and each fifth is followed by a validation, which saves."""

    class PowerCut(RuntimeError):
        pass

    class Cut(L.Callback):
        seen = 0

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.seen += 1

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if self.seen and trainer.fit_loop.total_batch_idx == 5 * (at // 2) + at % 2:
                raise PowerCut

    options = {"accumulate_grad_batches": 3, "val_check_interval": 5, "max_steps": 8, "use_distributed_sampler": False}

    def fit(name, *callbacks, **checkpoint):
        L.seed_everything(1, verbose=False)
        data = MarkovChain(vocab_size=VOCAB, sequence_length=16, batch_size=4, successors=2, validation_samples=8)
        run = trainer(tmp_path / name, [Validations(), *callbacks], **options)
        run.fit(pretraining(0.2), data, **checkpoint)

    fit("whole")
    with pytest.raises(PowerCut):
        fit("cut", Cut())
    fit("cut", ckpt_path=tmp_path / "cut" / "checkpoints" / "last.ckpt")
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    for name in ("train_loss", "val_loss", "tokens"):
        assert [row.get(name) for row in rows[0]] == [row.get(name) for row in rows[1]]


def test_a_validation_that_was_due_at_a_stop_comes_first(tmp_path):
    """It may be the best, and its row belongs to the step before."""
    options = {"max_steps": 12}
    trainer(tmp_path / "whole", [Validations()], **options).fit(pretraining(), Data())
    with pytest.raises(SystemExit):
        trainer(tmp_path / "cut", [Validations(), At(8, press_ctrl_c)], **options).fit(pretraining(), Data())
    assert [row["step"] for row in read_metrics(tmp_path / "cut" / "metrics.jsonl") if "val_loss" in row] == [3]
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    trainer(tmp_path / "cut", [Validations()], **options).fit(pretraining(), Data(), ckpt_path=last)
    found = [
        {row["step"]: row["val_loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "val_loss" in row}
        for name in ("whole", "cut")
    ]
    assert found[0] == found[1]
    assert list(found[0]) == [3, 7, 11]
    best = [saved_step(tmp_path / name / "checkpoints" / "best.ckpt") for name in ("whole", "cut")]
    assert best[0] == best[1]


def test_a_stop_during_a_validation_does_not_repeat_an_earlier_row(tmp_path):
    """The row that a checkpoint holds is of step 3, and has a metric more than that of step 4, which is in the log."""

    class LogsMore(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log("more", 1.0)

    class StopsTheValidation(L.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            if trainer.global_step == 4:
                press_ctrl_c()

    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    trainer(tmp_path / "cut", [LogsMore()], max_steps=3).fit(pretraining(), Data())
    with pytest.raises(SystemExit):
        trainer(tmp_path / "cut", [StopsTheValidation()]).fit(pretraining(), Data(), ckpt_path=last)
    assert saved_step(last) == 4
    trainer(tmp_path / "cut").fit(pretraining(), Data(), ckpt_path=last)
    trainer(tmp_path / "whole").fit(pretraining(), Data())
    tokens = [
        {row["step"]: row["tokens"] for row in read_metrics(tmp_path / name / "metrics.jsonl")}
        for name in ("whole", "cut")
    ]
    assert tokens[0] == tokens[1]


def test_a_curve_needs_an_interval():
    with pytest.raises(UserError, match="loss_curve: every_n_steps is 0; it must be at least 1"):
        LossCurve(every_n_steps=0)
