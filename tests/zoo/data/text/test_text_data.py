import inspect
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from kernels.errors import UserError
from tests.zoo.data.contract import on_rank
from zoo.data import Batch, MixedText, TextData
from zoo.data.text.tokenised_text import TokenisedText


class Recorder(L.LightningModule):
    """Learns one number; remembers every batch it was given."""

    def __init__(self, early: bool = False, stop_in: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.early, self.stop_in = early, stop_in
        self.seen: list[list[int]] = []
        self.validated = 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.stop_in:
            raise RuntimeError("a step that fails")
        self.seen.append(batch.tokens.flatten().tolist())
        return (self.weight - batch.tokens.float().mean()) ** 2

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated += batch.tokens.numel()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:
            # With max_epochs this makes Lightning build the loader, and its iterator, before it restores.
            assert self.trainer.estimated_stepping_batches == self.trainer.max_steps
            assert self.trainer.train_dataloader is not None
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, steps: int, *callbacks: L.Callback, validate: bool = False, epochs: int = -1) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1), *callbacks],
        max_steps=steps,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=2 if validate else 0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
    )


@pytest.fixture
def arguments(text_folder: str) -> dict:
    return {"path": text_folder, "vocab_size": 300, "sequence_length": 32, "batch_size": 16, "preprocessing_workers": 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("early", [False, True])
def test_stop_and_resume_with_lightning(arguments: dict, tmp_path: Path, early: bool):
    data = TextData(**arguments, validation_fraction=0.2)
    per_pass = len(data.train_dataloader())
    steps = 2 * per_pass + 2  # over the ends of passes
    epochs = 9 if early else -1
    whole = Recorder(early)
    trainer(tmp_path / "a", steps, validate=True, epochs=epochs).fit(whole, data)
    assert len(whole.seen) == steps
    assert whole.validated > 0
    for k in range(1, steps):
        data = TextData(**arguments, validation_fraction=0.2, num_workers=2 if k == 3 else 0)
        rest = Recorder(early)
        again = trainer(tmp_path / "b", steps, validate=True, epochs=epochs)
        again.fit(rest, data, ckpt_path=tmp_path / "a" / f"step={k}.ckpt")
        assert rest.seen == whole.seen[k:], k
    assert torch.equal(rest.weight, whole.weight)


@pytest.mark.filterwarnings("ignore")
def test_a_failed_step_is_done_again(arguments: dict, tmp_path: Path):
    whole, failing, rest = Recorder(), Recorder(stop_in=3), Recorder()
    trainer(tmp_path / "a", 6).fit(whole, TextData(**arguments))
    with pytest.raises(RuntimeError, match="a step that fails"):
        trainer(tmp_path / "b", 6, OnExceptionCheckpoint(tmp_path, "failed")).fit(failing, TextData(**arguments))
    trainer(tmp_path / "c", 6).fit(rest, TextData(**arguments), ckpt_path=tmp_path / "failed.ckpt")
    assert failing.seen + rest.seen == whole.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [3, 7])
def test_every_step_has_all_its_batches(arguments: dict, tmp_path: Path, accumulate: int):
    """Also at the end of a pass over the data, whose batches are no multiple; a step may be longer than a pass."""

    class Steps(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: object) -> None:
            batches.append(len(recorder.seen))

    recorder, batches, data = Recorder(), [0], TextData(**arguments)
    passes = len(data.train) // data.batch_size
    steps = 2 if accumulate > passes else 2 * passes // accumulate + 3
    run = trainer(tmp_path, steps, Steps())
    run.accumulate_grad_batches = accumulate
    run.fit(recorder, datamodule=data)
    assert passes % accumulate
    assert batches == [step * accumulate for step in range(steps + 1)]


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content if how == "flipped" else content[:-2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("how", "said"), [("flipped", "was altered"), ("cut", r"has \d+ bytes, its manifest says")])
def test_a_damaged_shard_ends_a_run_before_its_first_step(
    arguments: dict, tmp_path: Path, how: str, said: str, split: str
):
    data = TextData(**arguments, validation_fraction=0.2)
    file = data.train.shards.folder / f"{split}-00000.bin"
    damage(file, how)
    model = Recorder()
    with pytest.raises(UserError, match=rf"the shard {file} {said}"):
        trainer(tmp_path, 1).fit(model, TextData(**arguments, validation_fraction=0.2))
    assert model.seen == []


def test_large_shards_are_hashed_on_request(arguments: dict, monkeypatch: pytest.MonkeyPatch):
    file = TextData(**arguments).train.shards.folder / "train-00000.bin"
    damage(file, "flipped")
    TextData(**arguments, verify=False).setup()
    monkeypatch.setattr("zoo.data.text.shards.CHECKED_BYTES", 100)
    TextData(**arguments).setup()
    with pytest.raises(UserError, match=rf"the shard {file} was altered"):
        TextData(**arguments, verify=True).setup()


def test_another_batch_size_is_said(arguments: dict, caplog: pytest.LogCaptureFixture):
    TextData(**{**arguments, "batch_size": 4}).load_state_dict(TextData(**arguments).state_dict())
    assert "Resuming with data.batch_size=4; the checkpoint had 16." in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 0}, r"data\.sequence_length is 0; it must be at least 1"),
        ({"num_workers": -1}, r"data\.num_workers is -1; it must be at least 0"),
        ({"preprocessing_workers": 0}, r"data\.preprocessing_workers is 0; it must be at least 1"),
        ({"validation_fraction": 1.0}, r"data\.validation_fraction is 1\.0; it must lie between 0 and 1"),
        ({"packing": "none"}, r"data\.packing is 'none'; it must be one of windows, documents, whole_documents"),
        (
            {"validation_fraction": 1e-9, "sequence_length": 400},
            r"validation split has \d+ tokens; .* or raise data\.val",
        ),
    ],
)
def test_argument_errors(arguments: dict, change: dict, message: str):
    with pytest.raises(UserError, match=message):
        TextData(**{**arguments, **change}).setup()


def test_ranks_must_divide_the_batch(arguments: dict):
    data = TextData(**arguments)
    with pytest.raises(UserError, match=r"data\.batch_size is 16; .* must be a multiple of their number, 3"):
        on_rank(data, 1, 3).train_dataloader()
    assert next(iter(on_rank(data, 1, 2).train_dataloader())).tokens.shape == (8, 32)


@pytest.mark.parametrize("cls", [TextData, MixedText])
def test_text_data_shares_its_settings(cls: type[TokenisedText]):
    """With the same defaults, and by name only."""
    shared = inspect.signature(TokenisedText).parameters
    own = inspect.signature(cls).parameters
    assert {name: own[name] for name in shared} == dict(shared)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in shared.values())
    by_position = [name for name, parameter in own.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    assert by_position == [{TextData: "path", MixedText: "sources"}[cls]]
