"""Runs from Python: all that the command line can do, without it."""

import base64
import json
import logging
import re
import shutil
import signal
import warnings
from logging.handlers import BufferingHandler
from pathlib import Path

import lightning as L
import pytest

import zoo
from tests.zoo.tiny import At, press_ctrl_c

TINY = ("gdn_h2.yaml", "tiny.yaml")


class Counter(L.Callback):
    """A callback of a user's own."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.slow
def test_fit_gives_what_the_run_leaves(desk: Path) -> None:
    counter = Counter()
    result = zoo.fit(*TINY, {"trainer": {"max_steps": 3}}, "optim.warmup_steps=1", run="here", callbacks=[counter])
    assert result.folder == Path("runs/here")
    assert result.row == {
        k: v for k, v in json.loads((result.folder / "results.json").read_text()).items() if k in result.row
    }
    assert (result.row["status"], result.row["steps"]) == ("complete", 3)
    assert counter.steps == [1, 2, 3]
    loaded = zoo.load(result.folder)
    for name, weight in result.model.state_dict().items():
        assert weight.equal(loaded.state_dict()[name]), name
    page = result._repr_html_()
    assert f"{result.row['val_loss']:.3f}" in page
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture[1]) == (result.folder / "loss.png").read_bytes()
    assert "LanguageModel" not in repr(result)


@pytest.mark.slow
def test_a_change_stays_if_the_run_ends_before_its_next_checkpoint(desk: Path, finished: Path) -> None:
    run = shutil.copytree(finished / "runs" / "done", desk / "runs" / "done")
    row = json.loads((run / "results.json").read_text())
    step, tokens = row["steps"], row["tokens_seen"]
    change = {"tokens": tokens, "key": "trainer.max_steps", "from": step}
    lines = [
        json.dumps({"step": step - 1, **change, "to": step + 5}),
        json.dumps({"step": step, **change, "to": step + 1}),
    ]
    (run / "history.jsonl").write_text("\n".join(lines) + "\n")
    assert zoo.fit(resume="runs/done/checkpoints/last.ckpt").row["steps"] == step  # a checkpoint's own config
    (run / "history.jsonl").write_text("\n".join(lines) + "\n")
    assert zoo.fit(resume="done").row["steps"] == step + 1
    assert zoo.fit(resume="done").row["steps"] == step + 1


def test_the_error_of_a_damaged_checkpoint_names_a_whole_one(desk: Path, finished: Path) -> None:
    run = shutil.copytree(finished / "runs" / "done", desk / "runs" / "done")
    last, older = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "step-1.ckpt"
    content = last.read_bytes()
    older.write_bytes(content)
    last.unlink()  # another name of best.ckpt
    last.write_bytes(content[:2000])
    (run / "checkpoints" / "best.ckpt").write_bytes(content[:1000])
    change = {"step": 1, "tokens": 1, "key": "trainer.max_steps", "from": 1, "to": 2}
    (run / "history.jsonl").write_text(json.dumps(change) + "\n")
    hint = "resume='runs/done/checkpoints/step-1.ckpt' continues from another checkpoint"
    with pytest.raises(zoo.UserError, match=f"last.ckpt is truncated or not a checkpoint of this project; {hint}"):
        zoo.fit(resume="done")
    last.write_bytes(content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:])
    with pytest.raises(zoo.UserError, match=f"its bytes are not those that were written.*; {hint}"):
        zoo.fit(resume="done")
    last.write_bytes(content[:2000])
    older.write_bytes(content[:2000])
    with pytest.raises(zoo.UserError, match=r"last\.ckpt is truncated or not a checkpoint of this project\.$"):
        zoo.fit(resume="done")


@pytest.mark.slow
def test_overwrite_replaces_a_run_and_nothing_else(desk: Path, finished: Path) -> None:
    shutil.copytree(finished / "runs" / "done", desk / "runs" / "done")
    small = (*TINY, "trainer.max_steps=1", "optim.warmup_steps=1")
    (desk / "runs" / "done" / "thesis.tex").write_text("years of work")
    with pytest.raises(zoo.UserError, match=r"holds thesis\.tex, which is not a run's file"):
        zoo.fit(*small, run="done", overwrite=True)
    assert (desk / "runs" / "done" / "checkpoints" / "last.ckpt").is_file()
    (desk / "runs" / "done" / "thesis.tex").unlink()
    with pytest.raises(zoo.UserError, match="num_layers"):  # before anything is removed
        zoo.fit(*small, "model.num_layers=none", run="done", overwrite=True)
    before = {file: file.read_bytes() for file in (desk / "runs" / "done").rglob("*") if file.is_file()}
    for mistake, message in (
        ("optim.initial_weights=runs/none", "there is no checkpoint"),
        ("optim.initial_weights=runs/done", "has no weights"),
        ("data.sequence_length=1000000", "data.sequence_length is 1000000"),
    ):
        with pytest.raises(zoo.UserError, match=message):  # before the first batch
            zoo.fit(*small, mistake, run="done", overwrite=True)
        assert {file: file.read_bytes() for file in (desk / "runs" / "done").rglob("*") if file.is_file()} == before
    (desk / "runs" / "notes").mkdir()
    (desk / "runs" / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(zoo.UserError, match=r"holds thesis\.tex, which is not a run's file"):
        zoo.fit(*small, run="notes", overwrite=True)
    assert [path.name for path in (desk / "runs" / "notes").iterdir()] == ["thesis.tex"]
    sentence = "continue it with resume='runs/done', replace it with overwrite=True, or choose another run"
    with pytest.raises(zoo.UserError, match=f"^run: runs/done exists already; {sentence}$"):
        zoo.fit(*small, run="done")
    assert zoo.load("runs/done").num_layers == 3
    result = zoo.fit(*small, "model.num_layers=1", run="done", overwrite=True)
    assert (result.row["steps"], zoo.load("runs/done").num_layers) == (1, 1)
    steps = [json.loads(line)["step"] for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) <= 1


@pytest.mark.slow
def test_the_checkpoint_may_come_first(finished: Path, desk: Path) -> None:
    run = finished / "runs" / "done"
    by_name = zoo.validate(checkpoint=run, verbose=False)
    assert zoo.validate(run, verbose=False) == by_name
    limited = zoo.validate(str(run / "checkpoints" / "last.ckpt"), "data.batch_size=1", verbose=False)
    assert limited.keys() == by_name.keys()
    with pytest.raises(zoo.UserError, match=r'train with "data.test_fraction=0.05"'):
        zoo.test(run, verbose=False)
    assert zoo.predict(str(run), output="losses.jsonl").is_file()


@pytest.mark.slow
def test_what_libraries_tell_library_authors_is_not_shown(
    desk: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Warner(L.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            warnings.warn("the user's own", stacklevel=1)

    lightning, heard = logging.getLogger("lightning.pytorch"), BufferingHandler(capacity=100)
    monkeypatch.setattr(lightning, "handlers", [heard])
    lightning.setLevel(logging.INFO)
    zoo.fit(*TINY, "optim.warmup_steps=1", "trainer.max_steps=2", callbacks=[Warner()])
    shown = [warning for warning in recwarn if not issubclass(warning.category, DeprecationWarning)]  # as by default
    assert [str(warning.message) for warning in shown] == ["the user's own"]
    assert [record.getMessage() for record in heard.buffer] == []
    assert lightning.level == logging.INFO


@pytest.mark.slow
def test_a_run_goes_on_evaluates_writes_and_is_exported(desk: Path) -> None:
    first = zoo.fit(*TINY, run="first")
    longer = zoo.fit("trainer.max_steps=6", resume="first")
    assert (longer.folder, longer.row["steps"]) == (first.folder, 6)
    whole = zoo.fit(*TINY, "trainer.max_steps=6")
    assert whole.folder.name.startswith("gdn_h2-")  # named after its config
    numbers = zoo.validate("trainer.limit_val_batches=2", checkpoint=first.folder, verbose=False)
    assert numbers["val_loss"] == pytest.approx(longer.row["val_loss"], abs=1e-6)
    file = zoo.predict("trainer.limit_predict_batches=1", checkpoint=first.folder, output="losses.jsonl")
    assert len(file.read_text().splitlines()) == 2  # rows of the batch
    pieces: list[str] = []
    text = zoo.generate(first.folder, "def ", max_new_tokens=5, seed=1, stream=pieces.append)
    assert text.startswith("def ")
    assert "".join(pieces) == text
    exported = zoo.export(first.folder, "exported")
    assert zoo.generate(exported, "def ", max_new_tokens=5, seed=1) == text


@pytest.mark.slow
def test_ctrl_c_is_raised_and_heard_again_afterwards(desk: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        zoo.fit(*TINY, run="stopped", callbacks=[At(2, press_ctrl_c)])
    assert signal.getsignal(signal.SIGINT) is before
    assert zoo.fit(resume="stopped").row["steps"] == 4


@pytest.mark.slow
def test_a_sweep_lists_its_runs(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"base": ["gated_deltanet.yaml", "tiny.yaml"], "axes": {"model.stack.mixer.factor": [1, 2]}}
    planned = zoo.sweep(base, "seeds=[0,1]", "trainer.max_steps=2", folder="swept", dry_run=True)
    assert [outcome.run.name for outcome in planned.outcomes] == [
        f"factor={factor},seed={seed}" for factor in (1, 2) for seed in (0, 1)
    ]
    assert {outcome.run.read().trainer.max_steps for outcome in planned.outcomes} == {2}
    assert "factor=2,seed=1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_comparison_gives_its_rows(desk: Path) -> None:
    compared = zoo.compare("gla.yaml", "retnet.yaml", *_tiny_overrides(), folder="both")
    assert {row["run"] for row in compared.rows} == {"gla", "retnet"}
    assert (compared.folder / "comparison.png").is_file()


def _tiny_overrides() -> list[str]:
    return [
        "model.hidden_size=32",
        "model.num_heads=2",
        "model.num_layers=1",
        "data.sequence_length=32",
        "data.batch_size=2",
        "data.max_characters=200000",
        "data.vocab_size=512",
        "trainer.max_steps=2",
        "trainer.limit_val_batches=1",
        "trainer.accelerator=cpu",
    ]


@pytest.mark.slow
def test_a_benchmark_gives_its_report(desk: Path) -> None:
    report = zoo.bench("training", *TINY, length=16, batch_size=1, steps=1, device="cpu", folder="timed")
    assert not report.failed
    assert (Path("timed") / "bench.json").is_file()
    with pytest.raises(zoo.UserError, match="bench: 'lenght' is not an option of training; did you mean 'length'"):
        zoo.bench("training", *TINY, lenght=16)


@pytest.mark.slow
def test_data_without_a_test_set_is_told_in_one_sentence(desk: Path) -> None:
    (desk / "counting.py").write_text(
        """
import lightning as L
import torch
from torch.utils.data import DataLoader
from zoo.data import Batch

class Counting(L.LightningDataModule):
    vocab_size, sequence_length = 16, 8

    def get_tokenizer(self):
        return None

    def train_dataloader(self):
        tokens = torch.arange(9).remainder(16).expand(2, -1)
        return DataLoader([Batch(tokens[:, :-1], tokens[:, 1:], None)] * 9, batch_size=None)

    val_dataloader = train_dataloader
"""
    )
    result = zoo.fit(*TINY, "data=counting.Counting", run="counting")
    assert result.row["status"] == "complete"
    with pytest.raises(zoo.UserError, match="trainer: `test_dataloader` must be implemented"):
        zoo.test(checkpoint=result.folder)
