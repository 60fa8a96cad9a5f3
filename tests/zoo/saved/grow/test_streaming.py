"""A model grows in the dtypes that it has, without being in memory as a whole."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.forked_python import forked_python
from tests.zoo.saved.public.zoo_of_others import stored
from tests.zoo.saved.test_convert import MEASURE
from zoo.checkpoints.archive import save_sealed

from .subjects import exported, logits

KEPT = (".A_log", ".dt_bias", "norm.weight")  # in fp32, in the models below


def in_bf16(folder: Path, name: str, *overrides: str) -> Path:
    """An exported folder in bf16, but for some parameters in fp32."""
    exported(folder, name, *overrides)
    file = folder / "model.safetensors"
    tensors = {n: t if n.endswith(KEPT) else t.bfloat16() for n, t in load_file(file).items()}
    save_file(tensors, file)
    (folder / "hashes.json").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "init", "way"),
    [
        ("GLA", "reinit", "merge"),
        ("GLA", "inherit", "merge"),
        ("GatedDeltaNet", "inherit", "merge"),
        ("Mamba2", "reinit", "widen"),
        ("Mamba2", "preserve", "widen"),
        ("GLA", "preserve", "expand"),
    ],
)
def test_every_tensor_keeps_its_dtype(name: str, init: str, way: str, tmp_path: Path):
    before = in_bf16(tmp_path / "before", name)
    grown = zoo.statex(before, tmp_path / "after", layers=2, init=init, way=way, max_shard_size=20_000)
    old, new = stored(before), stored(grown.folder)
    assert len(list(grown.folder.glob("model-*.safetensors"))) > 1
    assert {n: new[n].dtype for n in old} == {n: tensor.dtype for n, tensor in old.items()}
    added = {n: new[n].dtype for n in new.keys() - old.keys()}
    assert (way == "expand") == bool(added)
    assert added == {n: torch.float32 if n.endswith("q_gain.weight") else torch.bfloat16 for n in added}
    stays = [n for n in old if not n.startswith(("layers.0.mixer", "layers.2.mixer"))]
    assert all(torch.equal(old[n], new[n]) for n in stays)
    if init == "preserve":
        torch.testing.assert_close(logits(grown.folder), logits(before), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_a_run_keeps_its_dtype(finished: Path, desk: Path):
    contents = torch.load(finished / "runs" / "done" / "checkpoints" / "last.ckpt", weights_only=True)
    contents["state_dict"] = {n: t.bfloat16() for n, t in contents["state_dict"].items()}
    with open(desk / "half.ckpt", "wb") as file:
        save_sealed(contents, file)
    new = stored(zoo.statex("half.ckpt", "larger", layers=[0, 1], init="inherit", factor=2).folder)
    assert {tensor.dtype for tensor in new.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_names_of_fused_parameters_keep_their_dtype(tmp_path: Path):
    """By which sharded optimisers save them."""
    folder = in_bf16(tmp_path / "before", "GLA")
    parameters = {n: p for n, p in zoo.load(folder).named_parameters()}
    dtypes = {n: torch.float32 if n.endswith(KEPT) else torch.bfloat16 for n in parameters}
    save_file({n: p.detach().to(dtypes[n]) for n, p in parameters.items()}, folder / "model.safetensors")
    new = stored(zoo.statex(folder, tmp_path / "after", layers=1).folder)
    assert {n: t.dtype for n, t in new.items()} == {
        n: torch.float32 if n.endswith(KEPT) else torch.bfloat16 for n in new
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 380 MB in shards of 50 MB, one of whose 20 layers is expanded."""
    folder = tmp_path_factory.mktemp("large")
    wide = ("model.num_layers=20", "model.intermediate_size=50000", "model.initializer_range=0.02")
    whole = exported(folder / "whole", "GLA", *wide)
    before = zoo.statex(whole, folder / "before", layers=[7], way="expand", max_shard_size=50_000_000).folder
    assert sum(file.stat().st_size for file in before.glob("*.safetensors")) > 360 * 2**20
    return before


@pytest.mark.slow
@pytest.mark.parametrize("init", ["reinit", "preserve"])
def test_memory_stays_near_one_shard_and_the_layers_that_grow(init: str, large: Path, tmp_path: Path):
    small = str(exported(tmp_path / "small", "GLA"))
    arguments = f"layers=1, init={init!r}, way='expand', max_shard_size=50_000_000"
    action = f"zoo.statex({str(large)!r}, {str(tmp_path / 'after')!r}, {arguments})"
    program = tmp_path / "program.py"
    program.write_text(MEASURE.format(action=action, small=small))
    done = subprocess.run([forked_python(), str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200, done.stdout
