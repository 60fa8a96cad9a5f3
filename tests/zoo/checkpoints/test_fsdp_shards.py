"""Shards of FSDP2: read as they were written, whole or not at all, and without running or unpacking what is in them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import UserError
from tests.test_trust import Bomb
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.format import FORMAT, KEY, read_checkpoint, read_weights, read_whole_checkpoint
from zoo.checkpoints.fsdp_shards import named_tensors, without_tensors, write_tensors
from zoo.checkpoints.zero_shards import divided_alike, remove_unused_shards, shard_hashes, shard_names

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process")
FOLDER, FILE, WEIGHT = "shards-00000001", "__0_0.distcp", "state_dict/model.weight"
WEIGHTS = {"model.weight": torch.arange(12.0).reshape(3, 4), "model.norm": torch.ones(4)}


def optimizer() -> dict[str, Any]:
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(3, 4), "kind": "a"}}
    return {"state": state, "param_groups": [{"params": [0]}]}


def save(folder: Path, states: list[dict[str, Any]], change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """A sharded checkpoint of one process; `change` changes its entry `shards`, and its hash is right again."""
    if not (folder / FOLDER).exists():
        tensors = write_tensors(folder / FOLDER, named_tensors(WEIGHTS, states))
        torch.save(tensors, folder / "tensors")
    tensors = torch.load(folder / "tensors", weights_only=True)
    shards = folder / FOLDER
    entry = {"folder": FOLDER, "files": shard_hashes(shards, shard_names(shards)), "tensors": tensors}
    if change is not None:
        change(entry)
    contents = {KEY: {"format": FORMAT}, "optimizer_states": without_tensors(states), "shards": entry}
    with (folder / "last.ckpt").open("wb") as file:
        save_sealed(contents, file)
    return folder / "last.ckpt"


def test_it_is_read_as_if_it_were_one_file(tmp_path: Path) -> None:
    states = [optimizer()]
    path = save(tmp_path, states)
    remove_unused_shards(tmp_path)
    checkpoint = read_whole_checkpoint(path)
    assert checkpoint.keys() == {KEY, "optimizer_states", "state_dict"}
    torch.testing.assert_close(checkpoint["state_dict"], WEIGHTS, rtol=0, atol=0)
    assert checkpoint["optimizer_states"][0]["param_groups"] == states[0]["param_groups"]
    read, written = (each["state"][0] for each in (checkpoint["optimizer_states"][0], states[0]))
    assert read.pop("kind") == written.pop("kind")
    torch.testing.assert_close(read, written, rtol=0, atol=0)
    assert read_weights(path).keys() == {"weight", "norm"}


def part(entry: dict[str, Any]) -> list[Any]:
    """The first part of a tensor."""
    return entry["tensors"][WEIGHT][2][0]


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a file elsewhere": lambda entry: part(entry).__setitem__(2, "../secret"),
    "beyond the file": lambda entry: part(entry).__setitem__(3, 1 << 40),
    "a negative place": lambda entry: part(entry).__setitem__(3, -1),
    "larger than the file": lambda entry: entry["tensors"].update(
        {WEIGHT: [torch.float32, [1 << 40], [[[0], [1 << 40], *part(entry)[2:]]]]}
    ),
    "larger than its parts": lambda entry: entry["tensors"][WEIGHT].__setitem__(1, [300, 4]),
    "parts shared by many": lambda entry: entry["tensors"].update(
        {f"state_dict/{i}": entry["tensors"][WEIGHT] for i in range(1000)}
    ),
    "another type": lambda entry: entry["tensors"][WEIGHT].__setitem__(0, "float32"),
    "another name": lambda entry: entry["tensors"].update({"callbacks/x": entry["tensors"].pop(WEIGHT)}),
    "no such optimiser": lambda entry: entry["tensors"].update(
        {"optimizer_states/7/0/exp_avg": entry["tensors"].pop(WEIGHT)}
    ),
    "no mapping": lambda entry: entry.update(tensors=[1]),
}


@pytest.mark.parametrize("read", [read_whole_checkpoint, read_weights])
@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_lies_is_refused(read: Callable[[Path], Any], lie: str, tmp_path: Path) -> None:
    path = save(tmp_path, [optimizer()], LIES[lie])
    with pytest.raises(UserError, match="is not as this project writes it"):
        read(path)


def test_zero_refuses_it(tmp_path: Path) -> None:
    path = save(tmp_path, [optimizer()])
    with pytest.raises(UserError, match="was not saved by ZeRO"):
        divided_alike(path, read_checkpoint(path), 2, 1)


def test_the_pickle_beside_the_shards_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, [])
    (tmp_path / FOLDER / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert read_whole_checkpoint(save(tmp_path, []))["state_dict"].keys() == WEIGHTS.keys()
    assert not Path("canary").exists()


def test_damage_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, [])
    file = tmp_path / FOLDER / FILE
    written = bytearray(file.read_bytes())
    written[len(written) // 2] ^= 1
    file.write_bytes(written)
    with pytest.raises(UserError, match="does not have the bytes that were written"):
        read_whole_checkpoint(path)
    file.unlink()
    with pytest.raises(UserError, match=r"incomplete: .* is missing"):
        read_whole_checkpoint(path)


def test_what_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_bytes(b"")  # a file in place of the folder
    with pytest.raises(OSError, match=r"shards|exists"):
        write_tensors(tmp_path / FOLDER, named_tensors(WEIGHTS, []))
