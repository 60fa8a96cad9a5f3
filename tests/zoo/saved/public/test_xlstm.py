"""xLSTM-large: fused weights, keys of the package xlstm, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zoo
from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.saved.public.import_export import exported, family_of, on_meta

from .zoo_of_others import Oracle, build, save, stored

PUBLISHED = {
    "model_type": "xlstm",
    **dict(embedding_dim=4096, num_blocks=32, num_heads=8, vocab_size=50304, head_dim=512, weight_mode="single"),
    **dict(qk_dim_factor=0.5, v_dim_factor=1.0, ffn_proj_factor=2.667, ffn_round_up_to_multiple_of=64),
    **dict(gate_soft_cap=15.0, output_logit_soft_cap=30.0, chunkwise_kernel="chunkwise--triton_xl_chunk"),
}


FUSED = {
    "q|k|v|ogate_preact": "qkv_opreact",
    "igate_preact|fgate_preact": "ifgate_preact",
    "proj_up_gate|proj_up": "proj_up_gate_z",
}


def read(**changes: Any) -> dict[str, Any]:
    config = {**PUBLISHED, **changes}
    return family_of(config, Path()).read(config)


def test_sizes_of_the_published_model():
    model = on_meta(read())
    assert model.num_parameters() == 6_865_424_896
    assert model.mixers[0].matrix_shape == (8, 256, 513)
    assert model.mlps[0].down_proj.in_features == 10944


@pytest.mark.slow
@pytest.mark.parity
def test_fused_weights_are_read_and_written_apart(oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, fused, folder = build("xlstm", oracle), {}, tmp_path / "theirs"
    apart = save(model, folder)
    for name, tensor in apart.items():
        for parts, whole in FUSED.items():
            if part := re.fullmatch(rf"(.*\.)({parts})\.(\w+)", name):
                all_parts = [apart[f"{part[1]}{other}.{part[3]}"] for other in parts.split("|")]
                fused[f"{part[1]}{whole}.{part[3]}"] = torch.cat(all_parts)
                break
        else:
            fused[name] = tensor
    assert len(fused) < len(apart)
    save_file(fused, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "weight_mode": "fused"}))
    zoo.convert(folder, tmp_path / "ours")
    zoo.convert(tmp_path / "ours", tmp_path / "back", to="hf_xlstm")
    returned = stored(tmp_path / "back")
    assert returned.keys() == apart.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in apart.items())
    tokens = torch.randint(97, (2, 67))
    monkeypatch.setattr(type(model).__base__, "_init_weights", lambda *_: None)  # it fails for fused gates
    with torch.no_grad():
        expected = type(model).from_pretrained(folder)(tokens).logits
        actual = zoo.load(folder)(tokens)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "use_bias is true; our mixers can do false"),
        ({"add_out_norm": False}, "add_out_norm is false; our mixers can do true"),
        ({"eps": 1e-5}, "eps is 1e-05; our mixers can do 1e-06"),
        ({"weight_mode": "split"}, 'weight_mode is "split"; our mixers can do "single" or "fused"'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true; our mixers can do false"),
        ({"hidden_size": 64}, "embedding_dim is 4096; our mixers can do hidden_size, 64"),
        ({"num_blocks": "all"}, 'num_blocks is "all"; our mixers can do 1 or more'),
        ({"gate_soft_cap": None}, "gate_soft_cap is null; our mixers can do a number above 0"),
        ({"slstm_at": [1]}, r"slstm_at is \[1\], which hf_xlstm does not know"),
    ],
    ids=str,
)
def test_configs_that_we_cannot_follow(changes: dict[str, Any], message: str):
    with pytest.raises(zoo.UserError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), "output_logit_soft_cap is null; our mixers can do a number above 0"),
        (("model.logit_cap=30.0", "model.stack.mixer.input_gate=sigmoid"), "stabilised is False instead of True"),
        (("model.logit_cap=30.0", "model.tie_embeddings=true"), "tie_word_embeddings is true"),
    ],
    ids=str,
)
def test_models_that_it_cannot_hold(changes: tuple[str, ...], message: str):
    sizes = ("model.vocab_size=96", "model.hidden_size=48", "model.num_heads=4", "model.num_layers=2")
    model = zoo.build(
        {"model": {"stack": {"class_path": "Uniform", "init_args": {"mixer": "MLSTM"}}}}, *sizes, *changes
    )
    with pytest.raises(zoo.UserError, match=f"^to: hf_xlstm cannot hold this model: .*{message}"):
        exported(model, TensorsInMemory(model.state_dict()), "hf_xlstm")


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("size", [48, 50, 55, 67])  # 29 / size · size is below 29 in the last three
def test_widths_that_no_round_factor_gives(oracle: Callable[[str], Any], size: int):
    """Factors are written so that transformers, which rounds their products down, builds tensors of our shapes."""
    of_mixer = {"class_path": "MLSTM", "init_args": {"num_heads": 1, "expand_k": 29 / size, "expand_v": 37 / size}}
    model = zoo.build(
        {"model": {"stack": {"class_path": "Uniform", "init_args": {"mixer": of_mixer}}}},
        *("model.vocab_size=9", f"model.hidden_size={size}", "model.num_layers=1", "model.intermediate_size=83"),
        "model.logit_cap=30.0",
    )
    config = exported(model, TensorsInMemory(model.state_dict()), "huggingface").config
    transformers = oracle("transformers")
    theirs = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**json.loads(json.dumps(config))))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == model.num_parameters()
