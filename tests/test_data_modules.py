"""A data module of one's own: Hugging Face's batches, no tokenizer, and what is missing in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import zoo
from kernels import UserError
from zoo.data import NO_LOSS, Batch, as_batch
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

from .commands import Command, run_process

OWN = """
import lightning as L
import torch
from torch.utils.data import DataLoader

class Counting(L.LightningDataModule):
    vocab_size = 16

    def samples(self):
        return [{"input_ids": (start + torch.arange(33)) % 16} for start in range(8)]

    def train_dataloader(self):
        return DataLoader(self.samples(), batch_size=2, collate_fn=self.collate)

    def collate(self, samples):
        tokens = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": tokens, "labels": tokens}

    val_dataloader = predict_dataloader = train_dataloader

class Anonymous(Counting):
    vocab_size = None

class Unlabelled(Counting):
    def collate(self, samples):
        return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}

class Extra(Counting):
    def collate(self, samples):
        return {**super().collate(samples), "token_type_ids": torch.zeros(2, 33)}

class Pairs(Counting):
    def collate(self, samples):
        return (*super().collate(samples).values(),)

class NotValidated(Counting):
    val_dataloader = None

class Untrainable(L.LightningDataModule):
    vocab_size = 16

class Odd(Counting):
    def get_tokenizer(self):
        return "gpt2"

class Foreign(Counting):
    vocab_size = 8

class Masked(Counting):
    vocab_size = 16

    def train_dataloader(self):
        tokens = torch.zeros(2, 33, dtype=torch.long)
        return DataLoader([{"input_ids": tokens - 1, "labels": tokens}], batch_size=None)

    val_dataloader = train_dataloader

class Empty(Counting):
    def train_dataloader(self):
        return DataLoader([], batch_size=None)
"""
FIT = ("fit", "--config=gla.yaml", "--config=tiny.yaml", "--run=r", "--model.hidden_size=32")
MISTAKES = {
    "Anonymous": "model.vocab_size: null, but Anonymous has neither vocab_size nor get_tokenizer(); set it",
    "Unlabelled": "data: a batch has input_ids, but no labels.",
    "Extra": "data: a batch has token_type_ids, which would not be used; its keys are input_ids, labels, ",
    "Pairs": "data: a batch is a tuple; it must be a zoo.data.Batch, or a mapping with input_ids and labels.",
    "Odd": "data: Odd.get_tokenizer() returns a str, which has no vocab_size; return a zoo.data.Tokenizer, such as ",
    "Untrainable": "trainer: ",
    "Foreign": "data: tokens of a batch are from 0 to 15; with model.vocab_size 8 they must be from 0 to 7.",
    "Masked": "data: tokens of a batch are from -1 to -1; with model.vocab_size 16 they must be from 0 to 15.",
    "Empty": "data: train_dataloader() of Empty has no batches",
}


@pytest.fixture
def fit(command: Command, desk: Path) -> Callable:
    """`fit` with a data module of `own_data.py`; what it names itself is the run's folder."""
    (desk / "own_data.py").write_text(OWN)
    (desk / "tiny.yaml").write_text(
        "\n".join(line for line in (desk / "tiny.yaml").read_text().splitlines() if "data:" not in line)
    )

    def call(name: str, *options: str):
        return command(*FIT, f"--data=own_data.{name}", *options)

    return call


@pytest.mark.slow
def test_hugging_faces_batches_without_a_tokenizer(fit: Callable, command: Command, desk: Path):
    fit("Counting", "--trainer.max_steps=60", "--optim.learning_rate=0.02", "--optim.warmup_steps=5").ok()
    row = json.loads((desk / "runs/r/results.json").read_text())
    assert row["val_loss"] < 0.5  # the label of a token is the one after it: log(16) = 2.8, and nothing else to learn
    assert row["tokens_seen"] == 60 * 2 * 33
    assert zoo.load(desk / "runs" / "r").vocab_size == 16
    for verb in ("validate", "predict"):
        assert command(verb, "--checkpoint=runs/r").code == 0
    losses = json.loads((desk / "losses.jsonl").read_text().splitlines()[0])["losses"]
    assert len(losses) == 33
    assert losses[-1] is None
    assert command("generate", "--checkpoint=runs/r").err.startswith(
        "error: checkpoint: runs/r was saved without a tok"
    )


def test_without_validation_data(fit: Callable, desk: Path):
    fit("NotValidated").ok()
    row = json.loads((desk / "runs/r/results.json").read_text())
    assert (row["status"], row["val_loss"]) == ("complete", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_missing_is_one_sentence(fit: Callable, name: str):
    done = fit(name).refused()
    assert done.err.splitlines()[-1].startswith(f"error: {MISTAKES[name]}")


@pytest.mark.slow
def test_two_processes_share_the_samples(fit: Callable, desk: Path, shared_cache: Path):
    """Lightning gives each process other samples of a DataLoader, so that all of them are seen once."""
    noting = "open(f'seen-{torch.distributed.get_rank()}', 'a').write(f'{tokens[0, 0]} {tokens[1, 0]} ')"
    (desk / "own_data.py").write_text(OWN.replace("        return {", f"        {noting}\n        return {{", 1))
    two = ("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_steps=2", "--trainer.num_sanity_val_steps=0")
    counting = (*FIT, "--data=own_data.Counting", "--trainer.limit_val_batches=0")
    run_process(desk, shared_cache, *counting, *two, timeout=180).ok()
    seen = [int(word) for rank in (0, 1) for word in (desk / f"seen-{rank}").read_text().split()]
    assert sorted(seen) == list(range(8))


def test_a_mapping_is_shifted():
    tokens = torch.tensor([[5, 6, 7, 8]])
    assert as_batch({"input_ids": tokens, "labels": tokens}).labels.tolist() == [[6, 7, 8, NO_LOSS]]
    prompt = torch.tensor([[NO_LOSS, NO_LOSS, 7, 8]])
    assert as_batch({"input_ids": tokens, "labels": prompt}).labels.tolist() == [[NO_LOSS, 7, 8, NO_LOSS]]


def test_padding_and_packed_documents_have_no_loss_across():
    tokens = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0]])
    padded = as_batch({"input_ids": tokens, "labels": tokens, "attention_mask": mask})
    assert padded.labels.tolist() == [[6, 7, NO_LOSS, NO_LOSS]]
    packed = as_batch({"input_ids": tokens, "labels": tokens, "cu_seqlens": torch.tensor([0, 1, 4])})
    assert packed.labels.tolist() == [[NO_LOSS, 7, 8, NO_LOSS]]
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "data: attention_mask of a batch has padding before tokens"),
        (
            {"labels": torch.zeros(1, 2, dtype=torch.long)},
            "data: the shapes of a batch are input_ids (1, 3), labels (1, 2)",
        ),
        (
            {"input_ids": torch.zeros(1, 3)},
            "data: input_ids of a batch is not a tensor of integers, but of torch.float32",
        ),
        ({"labels": [[1, 2, 3]]}, "data: labels of a batch is not a tensor of integers, but a list"),
    ],
    ids=["padding", "shapes", "floats", "list"],
)
def test_a_batch_that_does_not_fit(change: dict, said: str):
    tokens = torch.tensor([[5, 6, 7]])
    with pytest.raises(UserError) as error:
        as_batch({"input_ids": tokens, "labels": tokens, **change})
    assert str(error.value).startswith(said)


def test_a_batch_of_ours_stays():
    batch = Batch(torch.zeros(1, 2), torch.zeros(1, 2))
    assert as_batch(batch) is batch


class Text(L.LightningDataModule):
    """A few sentences, with a tokenizer."""

    def __init__(self, tokenizer: zoo.data.Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def get_tokenizer(self) -> zoo.data.Tokenizer:
        return self.tokenizer

    def train_dataloader(self) -> DataLoader:
        tokens = torch.tensor(self.tokenizer.encode("def f(x): return x " * 20)).repeat(4, 1)
        return DataLoader([{"input_ids": tokens, "labels": tokens}] * 3, batch_size=None)


@pytest.mark.slow
def test_plain_python_leaves_a_checkpoint_that_can_be_loaded(desk: Path, finished: Path, command: Command):
    tokenizer = zoo.load_tokenizer(finished / "runs" / "done")
    small = ("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2")
    model = zoo.build("gla.yaml", f"model.vocab_size={tokenizer.vocab_size}", *small)
    trainer = L.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=desk)
    trainer.fit(Pretraining(model, Optimisation(warmup_steps=1)), datamodule=Text(tokenizer))
    (checkpoint,) = (desk / "checkpoints").glob("*.ckpt")
    loaded = zoo.load(checkpoint)
    tokens = torch.tensor([tokenizer.encode("def f")])
    assert torch.equal(loaded(tokens)[0], model.eval()(tokens)[0])
    assert zoo.load_tokenizer(checkpoint).to_json() == tokenizer.to_json()
    assert command("generate", f"--checkpoint={checkpoint}", "--prompt=def", "--max_new_tokens=2").code == 0
    repeated = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=desk / "2"
    )
    repeated.fit(
        Pretraining(loaded.train(), Optimisation(warmup_steps=1), tokenizer), Text(tokenizer).train_dataloader()
    )
    (checkpoint,) = (desk / "2" / "checkpoints").glob("*.ckpt")
    assert zoo.load(checkpoint).num_layers == 2


def test_a_model_whose_constructor_was_called_has_no_config(desk: Path):
    assert zoo.build("gla.yaml", "model.vocab_size=16").config["model"]["num_layers"] > 0
    model = zoo.LanguageModel(zoo.lm.Uniform(zoo_mixer()), vocab_size=16, hidden_size=16, num_heads=2, num_layers=1)
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=desk)
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "labels": torch.zeros(1, 8, dtype=torch.long)}
    trainer.fit(Pretraining(model, Optimisation(warmup_steps=1)), DataLoader([batch], batch_size=None))
    (checkpoint,) = (desk / "checkpoints").glob("*.ckpt")
    with pytest.raises(UserError, match=r"holds no config to build its model from, as that was not made by zoo\.build"):
        zoo.load(checkpoint)


def zoo_mixer() -> type:
    import mixers

    return mixers.GLA
