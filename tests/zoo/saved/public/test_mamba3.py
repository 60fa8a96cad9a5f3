"""Mamba-3 in the layout of the package mamba_ssm: both ways, equal logits, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.saved.public.import_export import exported, family_of, on_meta

from .mamba3 import CASES, Model
from .test_families import close, decoded
from .zoo_of_others import save, stored

FAMILY = "mamba_ssm_mamba3"
PLAIN = CASES["mamba3"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_return_bit_for_bit(case: str, tmp_path: Path):
    model = Model(CASES[case]).to(torch.bfloat16)
    for layer in model.backbone["layers"]:
        layer["mixer"].dt_bias.data = layer["mixer"].dt_bias.data.float()  # every tensor keeps a dtype of its own
    written = save(model, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    zoo.convert(tmp_path / "theirs", tmp_path / "ours", max_shard_size=30_000)
    zoo.convert(tmp_path / "ours", tmp_path / "back", to="mamba_ssm", max_shard_size=50_000)
    returned = stored(tmp_path / "back")
    assert returned.keys() == written.keys()
    for name, tensor in written.items():
        assert returned[name].dtype == tensor.dtype, name
        assert torch.equal(returned[name], tensor), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    again = Model(config)  # it builds tensors of these shapes
    again.load_state_dict(returned, strict=not config["tie_embeddings"])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_are_theirs(case: str, tmp_path: Path):
    torch.manual_seed(len(case))
    model = Model(CASES[case])
    save(model, tmp_path / "theirs")
    ours = zoo.load(tmp_path / "theirs")
    for length in (1, 7, 67):
        tokens = torch.randint(97, (2, length))
        expected, actual = model(tokens), ours(tokens)[0]
        close(actual, expected)
    close(decoded(ours, tokens, 35), expected)  # 32 tokens one at a time
    row, bounds = tokens[:1], torch.tensor([0, 11, 67], dtype=torch.int32)
    close(ours(row, cu_seqlens=bounds)[0], torch.cat([model(row[:, :11]), model(row[:, 11:])], 1))
    rows = [torch.randint(97, (length,)) for length in (40, 5)]
    padded = model(torch.stack([F.pad(row, (0, 40 - len(row))) for row in rows]))  # on the right: no mask
    for row, expected_row in zip(rows, padded, strict=True):
        close(ours(row[None])[0][0], expected_row[: len(row)])


@pytest.mark.parametrize(
    ("changes", "layer", "message"),
    [
        ({}, {"is_mimo": True}, "ssm_cfg.is_mimo is true; our mixers can do False"),
        ({}, {"is_outproj_norm": True}, "ssm_cfg.is_outproj_norm is true; our mixers can do False"),
        ({}, {"A_floor": 0.1}, "ssm_cfg.A_floor is 0.1; our mixers can do 0.0001"),
        ({}, {"rope_fraction": 0.25}, "ssm_cfg.rope_fraction is 0.25; our mixers can do 0.5 or 1.0"),
        ({}, {"d_state": "all"}, 'ssm_cfg.d_state is "all"; our mixers can do 1 or more'),
        ({}, {"new": 1}, "ssm_cfg has the key 'new', which mamba_ssm_mamba3 does not know"),
        ({}, {"layer": "Mamba2"}, "has the model_type null, which no family of this version has"),
        ({"attn_layer_idx": [1]}, {}, r"attn_layer_idx is \[1\]; our mixers can do \[\] or null"),
    ],
    ids=str,
)
def test_configs_that_we_cannot_follow(changes: dict[str, Any], layer: dict[str, Any], message: str):
    config = {**PLAIN, **changes, "ssm_cfg": {**PLAIN["ssm_cfg"], **layer}}
    with pytest.raises(zoo.UserError, match=message):
        family_of(config, Path()).read(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.stack.mixer.output=GatedRMSNorm", "GatedRMSNorm instead of GateOnly"),
        ("model.stack.mixer.rotary_fraction=0.25", "pairs is 2 instead of 4"),
        ("model.norm_eps=1e-3", r"eps is 0.001 instead of 1e-05"),
        ("model.mlp=SwiGLU", "out_features is 192 instead of 256"),
    ],
)
def test_models_that_it_cannot_hold(change: str, message: str):
    config = family_of(PLAIN, Path()).read(PLAIN)
    model = zoo.build({"model": config}, "model.intermediate_size=96", change)
    with pytest.raises(zoo.UserError, match=f"^to: {FAMILY} cannot hold this model: .*{message}"):
        exported(model, TensorsInMemory(model.state_dict()), FAMILY)


def test_defaults_are_those_of_the_package():
    config = {"ssm_cfg": {"layer": "Mamba3"}}
    model = on_meta(family_of(config, Path()).read(config))
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.mlps) == (50280, 2560, 64, [])
    assert model.mixers[0].matrix_shape == (80, 128, 64)
