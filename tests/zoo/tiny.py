"""A language model, a tokenizer and a loader of a few lines, for tests of what goes on around them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn

from zoo.data.batch import Batch
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.callbacks.step_seeds import StepSeeds
from zoo.train.metrics_file import MetricsFile
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

VOCAB = 13


class TinyModel(nn.Module):
    """Embeddings, a leaky sum over time with dropout as the mixer, and a head."""

    vocab_size, hidden_size = VOCAB, 8
    no_weight_decay = ("mixer_weight",)
    mixers, embeddings, lm_head = (), None, None  # it has none that a table could name

    def __init__(self, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCAB, 8)
            self.mixer_weight = nn.Parameter(torch.randn(8, 8) / 3)
            self.head = nn.Linear(8, VOCAB)
        self.dropout = nn.Dropout(dropout)
        self.mixing = 1

    def forward(self, tokens, state=None, *, cu_seqlens=None):
        x, state = self.last_hidden(tokens, state, cu_seqlens=cu_seqlens)
        return self.logits(x), state

    def logits(self, x):
        return self.head(x)

    def last_hidden(self, tokens, state=None, *, cu_seqlens=None):
        embedded = self.embedding(tokens)
        carried = torch.zeros_like(embedded[:, 0]) if state is None else state
        starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
        mixed = []
        for t in range(tokens.shape[1]):
            carried = (0 if t in starts else 0.5) * carried + embedded[:, t]
            mixed.append(carried)
        mixed = self.dropout(torch.stack(mixed, 1)) @ self.mixer_weight
        return embedded + self.mixing * mixed, None if state is None else carried

    def init_state(self, batch_size: int, device=None, dtype=None) -> Tensor:
        return torch.zeros(batch_size, 8, device=device)

    @contextmanager
    def without_mixers(self) -> Iterator[None]:
        self.mixing = 0
        yield
        self.mixing = 1

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def state_size(self, length: int | None = None) -> int:
        return 8

    def flops(self, length: int) -> int:
        return 1000 * length


class ByteTokenizer:
    """Token i is byte i, 256 ends a document."""

    vocab_size, eos_id = 257, 256
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def to_json(self) -> str:
        return '{"bytes": true}'


class ResumableLoader:
    """Batch n is a function of n; the position is the state."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.length:
            self.position += 1
            yield batch(self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def batch(number: int) -> Batch:
    """Batch `number`: 4 sequences of 16 tokens that mostly count upwards."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(VOCAB, (4, 1), generator=generator)
    tokens = (start + torch.arange(17)) % VOCAB
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens = torch.where(noise, torch.randint(VOCAB, tokens.shape, generator=generator), tokens)
    return Batch(tokens[:, :-1], tokens[:, 1:], None)


class LossLog(L.Callback):
    """The training loss of each step, in full precision, by the number of the step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.global_step] = outputs["loss"].item()


class At(L.Callback):
    """Raises an error or calls something, once, at the end of the forward pass of a step."""

    def __init__(self, step: int, action: Exception | Callable[[], object]) -> None:
        self.step, self.action = step, action
        self.done = False

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == self.step - 1 and not self.done:
            self.done = True
            if isinstance(self.action, Exception):
                raise self.action
            self.action()


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    """Check that the parameters of two modules are equal to the bit."""
    for (name, x), (_, y) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(x, y), name


def pretraining(dropout: float = 0.0, tokenizer=None, **optim) -> Pretraining:
    optim = {"warmup_steps": 2, "learning_rate": 1e-2, **optim}
    return Pretraining(TinyModel(dropout), Optimisation(**optim), tokenizer, config={"model": {"hidden_size": 8}})


def trainer(folder: Path, callbacks=(), max_steps: int = 12, checkpoints: Checkpoints | None = None, **options):
    """A trainer that validates each 4 steps, on the CPU unless `options` say otherwise."""
    defaults = {"accelerator": "cpu", "val_check_interval": 4, "check_val_every_n_epoch": None, "log_every_n_steps": 1}
    return L.Trainer(
        max_steps=max_steps,
        default_root_dir=folder,
        logger=MetricsFile(folder),
        callbacks=[StepSeeds(), *callbacks, checkpoints or Checkpoints(every_n_steps=3)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | options),
    )


class Batches:
    """A loader over given batches; Lightning would take a plain list for a list of loaders."""

    def __init__(self, *batches: Batch) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def validation_loader() -> Batches:
    return Batches(batch(1000), batch(1001))


class Data(L.LightningDataModule):
    """Loaders that know their bigram baseline."""

    def train_dataloader(self):
        return ResumableLoader(40)

    def val_dataloader(self):
        return validation_loader()

    def bigram_loss(self):
        return 1.25
