"""Models as they are published: their config.json, cut down in size, is read or refused for the reason that is true."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo.saved.public.import_export import family_of

from . import formulas
from .public_folder import write
from .published import PUBLISHED, build, names, oracle_of, small, store
from .zoo_of_others import Oracle, in_pytorch, stored

TOLERANCE = 3e-5  # of the largest logit: fp32 rounding of both sides
REFUSED = {
    "mistralai/Ministral-8B-Instruct-2410": "layer_types is .*, which hf_mistral does not know",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "its published models are mixtures of experts",
    "state-spaces/mamba2attn-2.7b": r"attn_layer_idx is \[9, 18, 27, 36, 45, 56\]",
    "tiiuae/falcon-mamba-7b": "its layers normalise B, C and the time steps",
    "ibm-granite/granite-4.0-h-small": "num_local_experts is 72, so layer 0 is a mixture of experts",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "so layer 1 is a mixture of experts",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "so layer 1 is a mixture of experts",
    "RWKV/RWKV7-Goose-World2.8-0.1B": "head_size is 64, which fla_rwkv7 does not know",
}
READ = [name for name in PUBLISHED if name not in REFUSED]
LAYOUTS = ("safetensors", "shards", "bin", "bins")


def test_most_published_models_are_read():
    assert len(PUBLISHED) >= 40
    assert len(READ) >= 34
    assert all(entry["source"] for entry in PUBLISHED.values())


@pytest.mark.parity
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", READ)
def test_it_computes_what_its_project_computes(
    name: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    in_pytorch(monkeypatch)
    config = small(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build(config, tmp_path, oracle)
    model.save_pretrained(tmp_path / "saved")
    weights = names(config, stored(tmp_path / "saved"))
    # in turn, but the authors of Mamba publish pickles
    layout = "bin" if "model_type" not in config else LAYOUTS[list(PUBLISHED).index(name) % len(LAYOUTS)]
    store(weights, tmp_path, layout)
    tokens = torch.randint(model.config.vocab_size, (1, 21))
    if oracle_of(config) == "transformers":
        expected = model(tokens).logits
    elif config["model_type"] == "mamba2":  # of which transformers has the same model
        theirs = {**config, "layer_norm_epsilon": config["norm_eps"], "num_heads": 8}
        transformers = oracle("transformers")
        same = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**theirs)).eval()
        same.load_state_dict(model.state_dict())
        expected = same(tokens).logits
    else:
        kind = config["model_type"]
        expected = formulas.logits(kind, model.state_dict(), model.config.to_dict(), tokens[0])[None]
    actual = zoo.load(tmp_path)(tokens)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_for_the_reason_that_is_true(name: str, tmp_path: Path):
    folder = write(tmp_path / "theirs")
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    with pytest.raises(zoo.UserError, match=REFUSED[name]) as raised:
        zoo.convert(folder, tmp_path / "ours")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", {"mlp_bias": True}, "mlp_bias is true; our mixers can do false"),
        (
            "meta-llama/Llama-3.2-1B-Instruct",
            {"use_sliding_window": True},
            "use_sliding_window is true, which hf_llama",
        ),
        ("meta-llama/Llama-3.2-1B-Instruct", {"rope_interleaved": True}, "rope_interleaved is true, which hf_llama"),
        (
            "meta-llama/Llama-3.2-1B-Instruct",
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_scaling is .*longrope.* or the rope_type|rope_scaling is .* rope_type default, linear, llama3, yarn",
        ),
        ("Qwen/Qwen2.5-0.5B", {"use_mrope": True}, "use_mrope is true, which hf_qwen2 does not know"),
        ("Qwen/Qwen2.5-0.5B", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config is"),
        (
            "fla-hub/gla-1.3B-100B",
            {"use_short_conv": True},
            "share_conv_kernel is true; .* while use_short_conv is off",
        ),
        ("fla-hub/gla-1.3B-100B", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; .* the value of norm_eps, 1e-06"),
        ("fla-org/flame: Mamba2 of 340M", {"norm_before_gate": True}, "norm_before_gate is true; .* false"),
        (
            "state-spaces/mamba2-130m",
            {"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}},
            "ssm_cfg.norm_before_gate is true; our mixers can do false",
        ),
        ("state-spaces/mamba2-130m", {"ssm_cfg": {"layer": "Mamba2", "new": 2}}, "ssm_cfg.new is 2, which ssm_mamba2"),
        ("state-spaces/mamba2-130m", {"d_intermediate": 64}, "d_intermediate is 64; our mixers can do 0"),
        ("state-spaces/mamba-130m", {"rms_norm": False}, "rms_norm is false; our mixers can do true"),
        ("nvidia/Nemotron-H-8B-Base-8K", {"attention_head_dim": 64}, "attention_head_dim is 64; .* head_dim, 128"),
    ],
)
def test_a_value_that_changes_the_result_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path):
    config = {**PUBLISHED[name]["config"], **change}
    with pytest.raises(zoo.UserError, match=message):
        family_of(config, tmp_path).read(config)


def test_biases_that_a_config_promises_must_be_there(oracle: Oracle, tmp_path: Path):
    config = small("HuggingFaceTB/SmolLM2-135M")
    (tmp_path / "config.json").write_text(json.dumps(config))
    build(config, tmp_path, oracle).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(zoo.UserError, match=r"lacks .*q_proj.bias"):
        zoo.load(tmp_path)


OFF = (None, False, 0, 0.0, "", [], {}, "none", {"quant_method": None, "bits": 0})


@pytest.mark.parametrize("name", READ)
def test_keys_that_change_nothing_are_accepted(name: str, tmp_path: Path):
    config = PUBLISHED[name]["config"]
    family = family_of(config, tmp_path)
    expected = family.read(config)
    inner = dict(config.get("text_config", config))
    descriptive = {
        "_model_name_or_path": "x",
        "unk_token_id": 3,
        "image_token_id": 7,
        "eos_token": "</s>",
        "transformers_version": "9.9.9",
    }
    descriptive |= {
        "auto_map": {"AutoConfig": "x.Y"},
        "transformers.js_config": {"dtype": "q4"},
        "internal_version": "b",
    }
    for further in ({"new_trick": value} for value in OFF):
        changed = {**inner, **descriptive, **further}
        changed = {**config, "text_config": changed} if "text_config" in config else changed
        assert family.read(changed) == expected
    with pytest.raises(zoo.UserError, match=r"new_trick is 3, which .*convert --ignore=new_trick,other leaves it out"):
        family.read(
            {**changed, "text_config": {**changed["text_config"], "new_trick": 3, "other": "x"}}
            if "text_config" in config
            else {**changed, "new_trick": 3, "other": "x"}
        )


def test_keys_are_ignored_on_request(tmp_path: Path):
    folder = write(tmp_path / "theirs", new_trick=3, other="x")
    with pytest.raises(zoo.UserError, match="--ignore=new_trick,other"):
        zoo.convert(folder, tmp_path / "ours")
    with pytest.raises(zoo.UserError, match="--ignore=other"):
        zoo.convert(folder, tmp_path / "ours", ignore="new_trick")
    with pytest.raises(
        zoo.UserError, match=r"^ignore: 'new_trik' is not a key of config.json; did you mean 'new_trick'"
    ):
        zoo.convert(folder, tmp_path / "ours", ignore=["new_trik"])
    with pytest.raises(zoo.UserError, match=r"^ignore: num_heads changes what fla_gla computes"):
        zoo.convert(folder, tmp_path / "ours", ignore="new_trick,other,num_heads")
    zoo.convert(folder, tmp_path / "ours", ignore="new_trick,other")
    zoo.convert(write(tmp_path / "plain"), tmp_path / "as plain")
    assert (tmp_path / "ours" / "config.yaml").read_text() == (tmp_path / "as plain" / "config.yaml").read_text()
    with pytest.raises(zoo.UserError, match=r"ignore: .* is not a public checkpoint"):
        zoo.convert(tmp_path / "ours", tmp_path / "back", to="fla", ignore="new_trick")
