"""What is damaged is never loaded: each of many mutations of each kind of file is one sentence, or the same file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from kernels import UserError
from tests.zoo.lm.test_states import model_of
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.format import read_checkpoint, read_weights
from zoo.checkpoints.io import AtomicCheckpointIO
from zoo.checkpoints.zero_shards import check_shards, shard_hashes, shard_names
from zoo.files.sealed_json import write_sealed
from zoo.saved.export import export
from zoo.train.metrics_file import read_metrics
from zoo.train.results import read_row


@pytest.fixture(params=[60, pytest.param(500, marks=pytest.mark.nightly)], ids="{} mutations".format)
def mutations(request: pytest.FixtureRequest) -> int:
    return request.param


def mutated(content: bytes, draw: random.Random) -> bytes:
    """A file after something happened to it."""
    made = bytearray(content)
    first, second = sorted(draw.randrange(len(made)) for _ in range(2))
    length = min(1 + draw.randrange(64), second - first)
    match draw.randrange(6):
        case 0 | 1:
            made[first] ^= 1 << draw.randrange(8)
        case 2:
            del made[draw.choice([first, second, len(made) - 1 - draw.randrange(64)]) :]
        case 3:
            made[first : first + length] = bytes(len(made[first : first + length]))
        case 4:
            one, other = made[first : first + length], made[second : second + length]
            made[first : first + len(other)], made[second : second + len(other)] = other, one[: len(other)]
        case _:
            made += draw.choice([b"\0", b"\n", b" ", draw.randbytes(length), made[:second]])
    return bytes(made)


def what_loads(file: Path, load: Callable[[], object], mutations: int) -> list[bytes]:
    """The mutations of a file that `load` takes; the file is as it was in the end.

    It may raise nothing but a UserError, of one line.
    """
    written, draw, loaded, messages = file.read_bytes(), random.Random(file.name), [], set()
    load()
    for _ in range(mutations):
        now = mutated(written, draw)
        file.write_bytes(now)
        try:
            load()
        except UserError as error:
            messages.add(str(error))
        else:
            loaded.append(now)
    file.write_bytes(written)
    load()
    assert not [message for message in messages if "\n" in message]
    return [content for content in loaded if content != written]


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run to damage."""
    return shutil.copytree(finished / "runs" / "done", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_checkpoint, read_weights])
def test_a_checkpoint(run: Path, read: Callable[[Path], object], mutations: int):
    file = run / "checkpoints" / "last.ckpt"
    assert not what_loads(file, lambda: read(file), mutations)


@pytest.mark.slow
def test_the_end_of_a_checkpoint(run: Path):
    """Each byte of the hash, and of the archive's end before it."""
    file = run / "checkpoints" / "last.ckpt"
    written = file.read_bytes()
    for place in range(len(written) - 80, len(written)):
        now = bytearray(written)
        now[place] ^= 1 << place % 8
        file.write_bytes(now)
        with pytest.raises(UserError, match=r"is damaged|is truncated or not a checkpoint"):
            read_checkpoint(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "tokenizer.json", "hashes.json"])
def test_an_exported_folder(run: Path, tmp_path: Path, name: str, mutations: int):
    folder = export(run, tmp_path / "out")
    assert not what_loads(folder / name, lambda: zoo.load(folder), mutations)
    assert not what_loads(folder / name, lambda: zoo.load_tokenizer(folder), mutations // 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "load", "mutations"),
    [
        ("config.yaml", zoo.load, 20),
        ("model.safetensors", read_weights, 100),
        ("tokenizer.json", zoo.load_tokenizer, 100),
    ],
)
def test_an_exported_folder_without_hashes(run: Path, tmp_path: Path, name: str, load: Callable, mutations: int):
    """Nobody knows what was written, but what cannot be read is told in one sentence."""
    folder = export(run, tmp_path / "out")
    (folder / "hashes.json").unlink()
    what_loads(folder / name, lambda: load(folder), mutations)


def test_a_state(tmp_path: Path, mutations: int):
    model, file = model_of("GLA"), tmp_path / "state.safetensors"
    zoo.save_state(model(torch.tensor([[1, 2, 3]]), model.init_state(1))[1], file)
    assert not what_loads(file, lambda: zoo.load_state(model, file), mutations)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last.ckpt", "shards-1/a.pt", "shards-1/b.pt"])
def test_shards(run: Path, name: str, mutations: int):
    file, folder = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "shards-1"
    contents = torch.load(file, weights_only=True)
    folder.mkdir()
    torch.save({"weights": contents.pop("state_dict")}, folder / "a.pt")
    torch.save({"optimiser": contents.pop("optimizer_states")}, folder / "b.pt")
    entry = {"folder": "shards-1", "files": shard_hashes(folder, shard_names(folder)), "stage": 2, "world_size": 1}
    with open(file, "wb") as opened:
        save_sealed({**contents, "shards": {**entry, "parameters": {}}}, opened)

    def read() -> None:
        check_shards(file, read_checkpoint(file)["shards"])

    assert not what_loads(file.parent / name, read, mutations)


def test_a_checkpoint_without_its_hash_is_refused(run: Path):
    file = run / "checkpoints" / "last.ckpt"
    contents = torch.load(file, weights_only=True)
    for version in (1, 2):
        contents["zoo"]["format"] = version
        torch.save(contents, file)
        with pytest.raises(UserError, match="is damaged: the hash at its end is missing"):
            read_checkpoint(file)


def test_weights_of_others_are_known_by_the_checksums_of_their_archive(tmp_path: Path):
    file, weights = tmp_path / "weights.pt", torch.arange(64.0)
    torch.save({"a": weights}, file)
    written = file.read_bytes()
    place = written.index(weights.numpy().tobytes())
    file.write_bytes(written[: place + 5] + bytes([written[place + 5] ^ 1]) + written[place + 6 :])
    with pytest.raises(UserError, match="does not have its checksum"):
        read_weights(file)


def test_a_checkpoint_is_the_same_under_other_names(run: Path, tmp_path: Path):
    file = run / "checkpoints" / "last.ckpt"
    (tmp_path / "linked.ckpt").hardlink_to(file)
    shutil.copy(file, tmp_path / "copied.ckpt")
    for name in ("linked.ckpt", "copied.ckpt"):
        assert read_checkpoint(tmp_path / name)["zoo"]["format"] == 2
    assert torch.load(file, weights_only=True, mmap=True)["zoo"]["format"] == 2  # PyTorch's own reader goes on


def test_results(run: Path, mutations: int):
    """The file may have got a line more; what it says is the same."""
    file, row = run / "results.json", read_row(run)
    for content in what_loads(file, lambda: read_row(run), mutations):
        file.write_bytes(content)
        assert read_row(run) == row


@pytest.mark.parametrize(
    "change",
    [
        {"val_loss": "low"},
        {"val_loss": [[1]]},
        {"parameters": 10**400},
        {"wall_seconds": {"a": "long"}},
        {"val_accuracy": {"a": [1]}},
        {"status": ["complete"]},
        {"mixers": 3},
        {"run": None, "schedule": {"a": 1}},
    ],
)
def test_results_of_wrong_types(run: Path, change: dict[str, object]):
    """Of a stranger, who can write the hash, too."""
    write_sealed(run / "results.json", {**(read_row(run) or {}), **change})
    with pytest.raises(UserError, match=r"results\.json is damaged \(\w+ is not (a number|text)\); delete it"):
        read_row(run)


def test_results_without_a_status(run: Path):
    write_sealed(run / "results.json", {"val_loss": 1.0})
    with pytest.raises(UserError, match=r"results\.json is damaged \(it has no status\)"):
        read_row(run)


def test_metrics(run: Path, mutations: int):
    """Rows are left out with a warning; a reader never fails."""
    file, rows = run / "metrics.jsonl", read_metrics(run / "metrics.jsonl")
    written, draw = file.read_bytes(), random.Random(0)
    for _ in range(mutations):
        file.write_bytes(mutated(written, draw))
        read_metrics(file)
    file.write_bytes(written)
    assert read_metrics(file) == rows


def test_a_folder_that_became_a_link_is_not_written_to(tmp_path: Path):
    """A link to the checkpoints of another run, put there while a run writes."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "last.ckpt").write_text("precious")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"last\.ckpt is not written: .*checkpoints is a link; put a folder there"):
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "checkpoints" / "last.ckpt")
    assert (tmp_path / "theirs" / "last.ckpt").read_text() == "precious"
    assert len(list((tmp_path / "theirs").iterdir())) == 1
