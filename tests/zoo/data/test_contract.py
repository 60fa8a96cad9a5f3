"""What every data module does: a sample depends on its number alone, whoever reads it, and a run can be resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import UserError
from reproductions.listops import ListOps
from reproductions.mad import InContextRecall, SelectiveCopy
from zoo.data import MQAR, Images, MarkovChain, MixedText, RecallTask, Source, TextData, TokenTasks

from .contract import Data, on_rank, samples_of, some
from .image.test_images import Pictures

RECALL = [RecallTask(32, 4, 3.0), RecallTask(24, 2)]
COPY = [SelectiveCopy(16, 2, weight=3.0), InContextRecall(24)]
LISTS = {"min_length": 5, "max_length": 40, "max_depth": 4, "max_args": 5}
TEXT = {"vocab_size": 300, "sequence_length": 16, "preprocessing_workers": 1, "validation_fraction": 0.2}
Make = Callable[..., Data]
# how to make the data, and arguments that make other data, each with the part of the message that tells both values
MODULES: dict[str, tuple[type[Data], dict, list[tuple[dict, str]]]] = {
    "Markov chain": (
        MarkovChain,
        {"vocab_size": 16, "sequence_length": 24},
        [({"successors": 3}, "successors is 3, but the checkpoint was trained with 4")],
    ),
    "ListOps": (ListOps, LISTS, [({"max_args": 4}, "max_args is 4, but the checkpoint was trained with 5")]),
    "images": (
        Images,
        {"dataset": Pictures},
        [
            (
                {"dataset": lambda: Pictures(seed=1)},
                "dataset is Pictures of 40 .*, but the checkpoint .* Pictures of 40 ",
            )
        ],
    ),
    "recall": (MQAR, {"tasks": RECALL[:1], "vocab_size": 32}, []),
    "a fixed set of recall": (MQAR, {"tasks": RECALL[:1], "vocab_size": 32, "train_samples": 24}, []),
    "recall of two lengths": (
        MQAR,
        {"tasks": RECALL, "vocab_size": 32},
        [
            ({"seed": 1}, "seed is 1, "),
            ({"tasks": RECALL[:1]}, "tasks is "),
            ({"vocab_size": 64}, "vocab_size is 64, "),
            ({"train_samples": 64}, "train_samples is 64, "),
            ({"batch_size": 4}, "batch_size is 4, "),
        ],
    ),
    "a fixed set of two lengths": (MQAR, {"tasks": RECALL, "vocab_size": 32, "train_samples": 40}, []),
    "tasks of tokens": (
        TokenTasks,
        {"tasks": COPY, "vocab_size": 16},
        [({"tasks": [SelectiveCopy(16, 3, weight=3.0), InContextRecall(24)]}, "tasks is ")],
    ),
    "text": (
        TextData,
        TEXT,
        [
            ({"seed": 1}, "seed is 1, but the checkpoint was trained with 0"),
            ({"sequence_length": 8}, "sequence_length is 8, but the checkpoint was trained with 16"),
            ({"packing": "documents"}, "packing is documents, but the checkpoint was trained with windows"),
            ({"vocab_size": 301}, r".* has the data hash \w+, but the checkpoint was trained with \w+"),
        ],
    ),
    "mixed text": (MixedText, TEXT, [({"seed": 1}, "seed is 1, ")]),
}


@pytest.fixture
def make(request: pytest.FixtureRequest, text_folder: str, tmp_path: Path) -> Make:
    """The constructor of a data module, with batches of 8."""
    kind, arguments, _ = MODULES[request.param]
    if kind is TextData:
        arguments = {"path": text_folder, **arguments}
    if kind is MixedText:
        (tmp_path / "more.txt").write_text("\n".join(f"more {i} and {i * i}" for i in range(500)))
        more = Source(str(tmp_path / "more.txt"), 0.5)
        arguments = {"sources": {"texts": Source(text_folder, 2), "more": more}, **arguments}
    return lambda **changes: kind(**{"batch_size": 8, **arguments, **changes})


each_module = pytest.mark.parametrize("make", MODULES, indirect=True)


@pytest.mark.slow
@each_module
def test_resume_at_any_batch(make: Make):
    data = make()
    whole = [samples_of(batch) for batch in some(data, 12)]
    assert data.state_dict()["position"] == 96
    for step in range(10):
        repeated = make(num_workers=2 if step == 5 else 0)
        repeated.load_state_dict({**data.state_dict(), "position": 8 * step})
        assert [samples_of(batch) for batch in some(repeated, 2)] == whole[step : step + 2]
        assert repeated.state_dict() == {**data.state_dict(), "position": 8 * (step + 2)}


@pytest.mark.slow
@each_module
def test_any_number_of_devices_shares_the_batches(make: Make):
    whole = [sample for batch in some(make(), 12) for sample in samples_of(batch)]
    done, position = [], 0
    for ranks, steps in ((2, 3), (8, 2), (1, 4), (4, 3)):
        each = [on_rank(make(), rank, ranks, position) for rank in range(ranks)]
        parts = [some(data, steps) for data in each]
        done += [sample for step in zip(*parts, strict=True) for share in step for sample in samples_of(share)]
        (position,) = {data.state_dict()["position"] for data in each}
    assert done == whole


@pytest.mark.parametrize("make", ["Markov chain", "ListOps", "recall"], indirect=True)
def test_a_generated_sample_is_a_function_of_its_seed_split_and_number(make: Make):
    data, other = make(), make(seed=1)
    whole = samples_of(data.train.batch(range(20)))
    assert samples_of(make().train.batch([7, 3])) == [whole[7], whole[3]]
    assert len({str(sample) for sample in whole}) > 15
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), other.val_dataloader())
    batches = [next(iter(loader[0] if isinstance(loader, list) else loader)) for loader in loaders]
    assert len({str(samples_of(batch)[0]) for batch in batches}) == 4


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [(name, change, said) for name, (*_, changes) in MODULES.items() for change, said in changes],
    indirect=["make"],
)
def test_a_checkpoint_of_other_data(make: Make, change: dict, message: str):
    with pytest.raises(UserError, match=rf"data\.{message}"):
        make(**change).load_state_dict(make().state_dict())


@pytest.mark.parametrize("make", ["Markov chain", "recall", "text"], indirect=True)
def test_the_batch_size_may_change(make: Make):
    data, other = make(), make(batch_size=4)
    data.load_state_dict({**data.state_dict(), "position": 16})
    other.load_state_dict(data.state_dict())
    smaller = [batch.tokens for batch in some(other, 4)]
    for batch, first, second in zip(some(data, 2), smaller[::2], smaller[1::2], strict=True):
        assert torch.equal(batch.tokens, torch.cat([first, second]))
