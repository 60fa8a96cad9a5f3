"""`context_parallel` on the command line: two processes share every sequence, and train as one."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

import cli
from kernels import UserError
from mixers import ContextParallel, Site, TokenMixer
from tests.commands import FIT, Command, run_process, sitting_at
from tests.zoo.tiny import pretraining, trainer
from zoo import LanguageModel
from zoo.data import TextData
from zoo.lm import RWKV7ChannelMix, Uniform
from zoo.train.module import Pretraining

pytestmark = pytest.mark.slow

SHARED = ("--trainer.devices=2", "--trainer.strategy=ddp", "--context_parallel=2")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """The folder of a run of two processes, which compute their blocks again in the backward pass."""
    folder = tmp_path_factory.mktemp("sequences")
    with sitting_at(folder, shared_cache):
        pass  # writes tiny.yaml
    options = (*SHARED, "--activation_checkpointing=1")
    run_process(folder, shared_cache, *FIT, "--run", "shared", *options).ok()
    return folder / "runs/shared"


def numbers(run: Path, *names: str) -> list[list[float]]:
    """Columns of the metrics of each step."""
    with open(run / "metrics.csv", encoding="utf-8") as file:
        return [[float(row[name]) for name in names] for row in csv.DictReader(file)]


def test_two_processes_train_as_one(shared: Path, finished: Path) -> None:
    names = ("train_loss", "gradient_norm", "tokens")
    together, alone = numbers(shared, *names), numbers(finished / "runs/done", *names)
    assert len(alone) == 4
    for step, expected in zip(together, alone, strict=True):
        assert step == pytest.approx(expected, rel=1e-5)


def test_they_evaluate_as_one(shared: Path, finished: Path) -> None:
    two, one = (json.loads((run / "results.json").read_text()) for run in (shared, finished / "runs/done"))
    assert two["devices"] == 2
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)
    assert two["val_loss_by_position"] == pytest.approx(one["val_loss_by_position"], rel=1e-5)


# rows of 99 tokens, whose parts of 50 and 49 begin within documents
PACKED = ("--data.path=documents.jsonl", "--data.packing=documents", "--data.sequence_length=33", "--data.batch_size=3")
STRATEGIES = {
    "ddp": (),
    "ddp, accumulated": ("--trainer.accumulate_grad_batches=2", "--data.batch_size=1"),
    "zero1": ("--trainer.strategy={class_path: zoo.train.zero.Zero, init_args: {stage: 1}}",),
    "zero2": ("--trainer.strategy={class_path: zoo.train.zero.Zero, init_args: {stage: 2}}",),
    "fsdp2": ("--trainer.strategy={class_path: zoo.train.fsdp2.FSDP2}", "--activation_checkpointing=1"),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of short documents."""
    folder = tmp_path_factory.mktemp("packed")
    texts = (" ".join(f"{i} times {j} is {i * j}." for j in range(i % 7 + 1)) for i in range(900))
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*STRATEGIES][1:])]
)
def test_packed_documents_train_as_in_one(strategy: str, packed: Path, shared_cache: Path) -> None:
    options = STRATEGIES[strategy]
    accumulated = [each for each in options if not each.startswith("--trainer.strategy")]
    with sitting_at(packed, shared_cache):
        assert cli.run([*FIT, *PACKED, *accumulated, "--run", f"one {strategy}"]) == 0
        command = (*FIT, *PACKED, *SHARED, *options, "--run", f"two {strategy}")
        run_process(packed, shared_cache, *command).ok()
    one, two = (packed / "runs" / f"{number} {strategy}" for number in ("one", "two"))
    names = ("train_loss", "gradient_norm", "tokens")
    for step, expected in zip(numbers(two, *names), numbers(one, *names), strict=True):
        assert step == pytest.approx(expected, rel=1e-5)
    evaluations = [json.loads((run / "results.json").read_text()) for run in (one, two)]
    for name in ("val_loss", "val_loss_by_position"):
        assert evaluations[1][name] == pytest.approx(evaluations[0][name], rel=1e-5, nan_ok=True)


def test_their_checkpoint_is_read_by_one(shared: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--trainer.devices=1", "--trainer.strategy=auto", "--context_parallel=1")
    with sitting_at(shared.parents[1], shared_cache):
        assert cli.run(["validate", "--checkpoint", "runs/shared", *alone]) == 0
    assert "validated on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context_parallel=0",), "context_parallel is 0; it must be at least 1"),
        (("--context_parallel=2",), "context_parallel: 2 needs a multiple of 2 devices, not 1, and DDP or FSDP2"),
        (("--context_parallel=2", "--compile=true"), "cannot share sequences of compiled blocks"),
    ],
)
def test_a_run_that_cannot_be_shared(command: Command, options: tuple[str, ...], message: str) -> None:
    done = command(*FIT, *options).refused()
    assert message in done.err


class Whole(TokenMixer):
    """A mixer that knows nothing of parts."""

    def __init__(self, site: Site | None = None) -> None:
        super().__init__()

    def forward(self, x: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        return x, state


class WholeMLP(RWKV7ChannelMix):
    """A channel mixer that reads earlier tokens, and knows nothing of parts."""

    def forward(self, x: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        return super().forward(x, state, cu_seqlens=cu_seqlens)


def test_what_else_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pretraining()
    module.context_parallel = 2
    divided = SimpleNamespace(strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy), world_size=2)
    divided.strategy.config = {"zero_optimization": {"stage": 3}}
    monkeypatch.setattr(Pretraining, "trainer", divided)
    with pytest.raises(UserError, match="not 2 with ZeRO 3"):  # although that is a DDPStrategy, too
        module.setup("fit")
    run = trainer(tmp_path, strategy="ddp", devices=2)
    monkeypatch.setattr(Pretraining, "trainer", run)
    with pytest.raises(UserError, match="predict reads whole sequences"):
        module.setup("predict")
    with pytest.raises(UserError, match="must be a ResumableData"):
        module.setup("fit")
    run.datamodule = TextData()
    module.model.mixer = Whole()
    with pytest.raises(UserError, match="Whole works on whole sequences only"):
        module.setup("fit")
    module.model.mixer = WholeMLP(8)
    with pytest.raises(UserError, match="WholeMLP works on whole sequences only"):
        module.setup("fit")


def test_a_model_names_the_mixer_that_cannot_share() -> None:
    model = LanguageModel(Uniform(Whole), vocab_size=7, hidden_size=8, num_heads=1, num_layers=1)
    tokens, part = torch.zeros(1, 4, dtype=torch.int64), ContextParallel.__new__(ContextParallel)
    for call in (model, lambda tokens, **given: model.loss(tokens, tokens, **given)):
        call(tokens)
        with pytest.raises(UserError, match=r"^context_parallel: Whole works on whole sequences only$"):
            call(tokens, context_parallel=part)


def test_neighbours_get_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        overfit_batches, lightning_module, world_size = 0, pretraining(), 4

        def __init__(self, rank: int) -> None:
            self.global_rank = rank

    Trainer.lightning_module.context_parallel = 2
    data, shares = TextData(batch_size=6), []
    for rank in range(4):
        data.trainer = Trainer(rank)
        shares.append(data.ranks())
    assert shares == [(0, 2), (0, 2), (1, 2), (1, 2)]
    data.batch_size = 5
    with pytest.raises(UserError, match="multiple of their number, 2 groups of 2"):
        data.ranks()
