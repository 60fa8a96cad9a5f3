"""Weights in `pytorch_model.bin` and in its shards: tensors return bit for bit, and nothing else is unpickled."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import UserError
from zoo.checkpoints.pickled import INDEX, SINGLE, PickledTensors, has_pickles

WEIGHTS = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}


def sharded(folder: Path, **changed: str) -> Path:
    """Write one tensor a file, and their index."""
    names = {name: f"pytorch_model-{name}.bin" for name in WEIGHTS}
    for name, file in names.items():
        torch.save({name: WEIGHTS[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**names, **changed}}))
    return folder


def single(folder: Path, contents: Any) -> Path:
    torch.save(contents, folder / SINGLE)
    return folder


class Code:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("run.txt"),)


@pytest.mark.parametrize("write", [sharded, lambda folder: single(folder, WEIGHTS)], ids=["shards", "one file"])
def test_tensors_return(write: Any, tmp_path: Path):
    assert not has_pickles(tmp_path)
    folder = write(tmp_path)
    assert has_pickles(folder)
    tensors = PickledTensors(folder)
    assert sorted(file.name for file in tensors.files) == sorted(file.name for file in folder.glob("*.bin"))
    for name, tensor in WEIGHTS.items():
        assert (tensors.specs[name].shape, tensors.specs[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(tensors.tensor(name), tensor)


def test_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for contents in (pickle.dumps(Code()), None):
        if contents is None:
            single(tmp_path, {"a": Code()})
        else:
            (tmp_path / SINGLE).write_bytes(contents)
        with pytest.raises(UserError, match="refused, as only tensors are unpickled: "):
            PickledTensors(tmp_path)
    assert not Path("run.txt").exists()


def test_what_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"none of its files has lost, which pytorch_model\.bin\.index\.json names"):
        PickledTensors(sharded(tmp_path, lost="pytorch_model-a.bin"))
    with pytest.raises(UserError, match=r"pytorch_model-c\.bin, which pytorch_model\.bin\.index\.json names, is miss"):
        PickledTensors(sharded(tmp_path, lost="pytorch_model-c.bin"))
    with pytest.raises(UserError, match=r"\.\./x\.bin"):
        PickledTensors(sharded(tmp_path, lost="../x.bin"))


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ({5: torch.zeros(2)}, "5 is not a name of a tensor"),
        ({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, "'a' has the dtype torch.float8_e4m3fn"),
        ({"a": torch.zeros(2, dtype=torch.int8)}, "'a' has the dtype torch.int8"),
    ],
)
def test_what_is_no_weight_is_refused(contents: Any, says: str, tmp_path: Path):
    with pytest.raises(UserError, match=says):
        PickledTensors(single(tmp_path, contents))
