"""Hybrids of transformers: defaults, released names, and configs and models that are refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo
from kernels import UserError
from mixers import Mamba2
from zoo.checkpoints.tensor_files import TensorFiles, TensorsInMemory
from zoo.lm import LanguageModel
from zoo.saved.public.families import FAMILIES
from zoo.saved.public.import_export import difference, exported, family_of, on_meta

from .hybrids import BAMBA, CASES, CLASSES, GRANITE, KIMI, MULTIPLIERS, NEMOTRON, NEMOTRON_KINDS, OLMO, QWEN
from .models import excited
from .zoo_of_others import in_pytorch

# relative to the norm of all logits: fp32 rounding of both sides, each up to 1e-5 away from our logits in fp64
TOLERANCE = 3e-5
CONV = "model.layers.0.linear_attn."
Make = Callable[..., Path]


@pytest.fixture
def theirs(oracle: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Saves a small model of theirs, no parameter of which is a special value, and returns its folder."""
    transformers = oracle("transformers")
    in_pytorch(monkeypatch)

    def save(name: str, config: Mapping[str, Any]) -> Path:
        torch.manual_seed(0)
        of_config, of_model = (getattr(transformers, kind) for kind in CLASSES[name])
        model = of_model(of_config(**config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        folder = tmp_path / "theirs"
        model.save_pretrained(folder)
        return folder

    return save


def read(folder: Path) -> nn.Module:
    """The model in a folder, as transformers reads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def tensors(folder: Path) -> dict[str, Tensor]:
    files = TensorFiles(folder)
    return {name: files.tensor(name) for name in files.specs}


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    assert error < TOLERANCE, f"relative error {error:.2g}"


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def released(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """OLMo-Hybrid's weights under the names, and with the convolutions, of the published checkpoints."""
    found = dict(saved)
    for layer in range(4):
        at = f"model.layers.{layer}."
        if layer == 3:
            found[f"{at}post_attention_layernorm.weight"] = found.pop(f"{at}feedforward_layer_norm.weight")
        else:
            names = [f"{at}linear_attn.{x}_conv1d.weight" for x in "qkv"]
            whole = torch.cat([found[name] for name in names])
            found |= {name: x.clone() for name, x in zip(names, whole.split([16, 16, 48]), strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parity
@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_olmo_hybrid_as_it_was_released(theirs: Make, tmp_path: Path, packed: bool):
    folder = theirs("olmo_hybrid", OLMO)
    model, file = read(folder), folder / "model.safetensors"
    weights = released(load_file(file))
    save_file(weights, file)
    zoo.convert(folder, tmp_path / "ours")
    zoo.convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    assert_same(tensors(tmp_path / "back"), weights)
    if packed:  # as transformers names and packs them in memory
        save_file({name: x.contiguous() for name, x in model.state_dict().items()}, file)
    assert_same(zoo.load(folder).state_dict(), zoo.load(tmp_path / "ours").state_dict())
    tokens = torch.randint(96, (1, 33))
    assert_close(zoo.load(folder)(tokens)[0], model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {**w, f"{CONV}k_conv1d.weight": torch.ones(9, 1, 4)}, "other shapes .*k_conv1d.weight"),
        (lambda w: {**w, f"{CONV}v_conv1d.weight": torch.ones(48, 1, 3)}, "other shapes .*v_conv1d.weight"),
        (lambda w: {**w, f"{CONV}q_conv1d.weight": torch.tensor(1.0)}, "other shapes .*q_conv1d.weight"),
        (lambda w: {**w, f"{CONV}conv1d.weight": torch.ones(80, 1, 4)}, "holds .*linear_attn.conv1d.weight"),
        (lambda w: {k: x for k, x in w.items() if "0.linear_attn.q_conv" not in k}, "lacks .*q_conv1d.weight"),
        (lambda w: {**w, "model.layers.0.input_layernorm.weight": torch.ones(48)}, "holds .*input_layernorm"),
        (lambda w: {**w, "model.layers.3.input_layernorm.weight": torch.ones(48)}, "holds .*3.input_layernorm"),
        (lambda w: {**w, "lm_head.bias": torch.ones(96)}, "holds lm_head.bias"),
    ],
    ids=["rows", "taps", "a number", "twice", "missing", "a norm twice", "of another kind of layer", "a bias"],
)
def test_weights_that_do_not_fit(theirs: Make, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str):
    folder = theirs("olmo_hybrid", OLMO)
    save_file(change(released(load_file(folder / "model.safetensors"))), folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        zoo.load(folder)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("name", CLASSES)
def test_what_configs_leave_out_is_as_in_theirs(oracle: Callable[[str], Any], name: str):
    transformers, family = oracle("transformers"), next(f for f in FAMILIES if f.name == f"hf_{name}")
    of_config, of_model = (getattr(transformers, kind) for kind in CLASSES[name])
    sizes = {"num_hidden_layers": 4, "vocab_size": 1000, "pad_token_id": None}
    sizes |= {
        "kimi_linear": {"first_k_dense_replace": 4},
        **{"granite_hybrid": {"num_local_experts": 0}, "nemotron_h": {"layers_block_type": [*NEMOTRON_KINDS, "mlp"]}},
    }.get(name, {})
    config = of_config(**sizes)
    with torch.device("meta"):
        theirs = of_model(config)
    ours = on_meta(family.read(sizes))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == ours.num_parameters()
    assert difference(ours, on_meta(family.read(config.to_dict()))) is None


@pytest.mark.parity
@torch.no_grad()
def test_the_text_of_qwen3_5_inside_a_model_that_sees(theirs: Make, caplog: pytest.LogCaptureFixture):
    folder = theirs("qwen3_5", QWEN)
    model, file, config = read(folder), folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    inside = {name.replace("model.", "model.language_model.", 1): x for name, x in load_file(file).items()}
    others = {"mtp.fc.weight": torch.ones(3, 3), "model.visual.patch_embed.proj.weight": torch.ones(2, 2)}
    save_file({**inside, **others}, file)
    config["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    whole = {"model_type": "qwen3_5", "text_config": config, "vision_config": {"depth": 3}, "image_token_id": 5}
    (folder / "config.json").write_text(json.dumps(whole))
    tokens = torch.randint(96, (1, 33))
    assert_close(zoo.load(folder)(tokens)[0], model(tokens).logits)
    told = next(record.getMessage() for record in caplog.records if "has no use for" in record.getMessage())
    assert all(name in told for name in others)  # nothing is lost in silence


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)])
def test_the_larger_model_says_whether_embeddings_are_tied(outer: bool | None, inner: bool, tied: bool):
    layers = {"num_hidden_layers": 4, "hidden_size": 64, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    whole = {"model_type": "qwen3_5", "text_config": {**layers, "tie_word_embeddings": inner}}
    whole |= {} if outer is None else {"tie_word_embeddings": outer}
    assert family_of(whole, Path()).read(whole)["tie_embeddings"] == tied


@pytest.mark.slow
@pytest.mark.parity
@torch.no_grad()
@pytest.mark.parametrize("name", CLASSES)
def test_a_model_of_ours_as_theirs(theirs: Make, tmp_path: Path, name: str):
    first = zoo.load(theirs(*CASES[name]))
    first.reset_parameters()  # with our initial values
    folder = saved_as(name, first, tmp_path / "exported")
    tokens = torch.randint(96, (2, 35))
    assert_close(read(folder)(tokens).logits, first(tokens)[0])
    assert_same(zoo.load(folder).state_dict(), first.state_dict())


@pytest.mark.slow
@pytest.mark.parity
@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_the_config_of_a_hybrid_is_theirs(theirs: Make, tmp_path: Path, name: str):
    model = excited(zoo.build(f"{name}.yaml", "model.vocab_size=96", "model.num_layers=4"))
    tokens = torch.randint(96, (2, 77))
    assert_close(read(saved_as(name, model, tmp_path / "exported"))(tokens).logits, model(tokens)[0])


@pytest.mark.parity
@torch.no_grad()
def test_small_steps_of_time_of_nemotron_h(oracle: Callable[[str], Any], tmp_path: Path):
    oracle("transformers")
    family = next(family for family in FAMILIES if family.name == "hf_nemotron_h")
    model = on_meta(family.read(NEMOTRON)).to_empty(device="cpu").eval()
    model.reset_parameters()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    for mixer in model.mixers:
        if isinstance(mixer, Mamba2):
            mixer.decay.dt_bias.fill_(-6)  # steps near 2e-3, many of them below the 1e-3 of their `time_step_min`
    tokens = torch.randint(96, (2, 35))
    assert_close(read(saved_as("nemotron_h", model, tmp_path / "exported"))(tokens).logits, model(tokens)[0])


def saved_as(name: str, model: LanguageModel, folder: Path) -> Path:
    """Folder with a model of this project, exported to the layout of a family."""
    public = exported(model, TensorsInMemory(model.state_dict()), f"hf_{name}")
    folder.mkdir()
    weights = {key: public.weights.tensor(key).contiguous() for key in public.weights.specs}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(public.config))
    return folder


def folder_of(tmp_path: Path, **config: Any) -> Path:
    """A folder whose config.json is all that matters."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", **QWEN, **config}))
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, r'hidden_act is "gelu"; our mixers can do "silu"'),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_parameters is .*dynamic.*; our mixers can do null, or the rope_type default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "new": 1}}, "rope_scaling is .*; .* linear with factor"),
        ({"rope_scaling": {"type": "linear", "factor": "a"}}, 'rope_scaling.factor is "a"; our mixers can do numbers'),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling lacks low_freq_factor, which llama3 needs"),
        ({"rope_theta": None}, "rope_theta is null; our mixers can do a number"),
        ({"layer_types": ["linear_attention"] * 3}, r"layer_types is .*one of them for each of the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*sliding.*linear_attention and full_attention"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; our mixers can do 1 or more"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"model_type": "qwen3_5_moe"}, 'model_type "qwen3_5_moe", .*known: '),
        (
            {"model_type": "olmo_hybrid", "head_dim": None, "layer_types": ["full_attention"] * 4},
            "layer_types is .*linear_attention and full_attention in one model",
        ),
    ],
    ids=str,
)
def test_configs_that_we_cannot_follow(tmp_path: Path, config: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as raised:
        zoo.convert(folder_of(tmp_path, **config), tmp_path / "ours")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ours").exists()


CONFIGS = {"kimi_linear": KIMI, "bamba": BAMBA, "granitemoehybrid": GRANITE, "nemotron_h": NEMOTRON}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "kimi_linear": [
        ({"mlp_layer_types": None}, "first_k_dense_replace is 1, so layer 1 is a mixture of experts; ours are dense"),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "dense"]}, "so layer 2 is a mixture of experts"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true; our mixers can do false"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; our mixers can do null or num_attention_heads"),
        ({"mla_use_nope": False}, "mla_use_nope is false; our mixers can do true"),
        # of Kimi K3
        ({"linear_attn_config": {"use_full_rank_gate": True}}, "linear_attn_config is .*use_full_rank_gate"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "linear_attn_config is .*gate_lower_bound"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is true, which hf_kimi_linear does not know"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0; our mixers can do 1 or more"),
        (
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2, 4]}},
            "layer_types is .*null.* one of them for each of the 4 layers",
        ),
    ],
    "bamba": [
        (
            {"mamba_n_heads": 7},
            "mamba_n_heads is 7; our mixers can do mamba_expand · hidden_size / mamba_d_head, 96 / 12",
        ),
        ({"attn_layer_indices": [4]}, r"attn_layer_indices is \[4\]; our mixers can do a list of layers from 0 to 3"),
        ({"attn_rotary_emb": 12}, "attn_rotary_emb is 12; our mixers can do 6, as transformers turns"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is true; our mixers can do false"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]"),
    ],
    "granitemoehybrid": [
        ({"num_local_experts": 8}, "num_local_experts is 8, so layer 0 is a mixture of experts; ours are dense"),
        ({"layer_types": ["mamba"] * 3}, "layer_types is .* one of them for each of the 4 layers"),
        ({"layer_types": ["mamba", "mlp", "mamba", "mamba"]}, "layer_types is .*mlp.* linear_attention and full_att"),
        ({"residual_multiplier": 0}, "residual_multiplier is 0; our mixers can do numbers above 0"),
        ({"position_embedding_type": "alibi"}, 'position_embedding_type is "alibi"; .* null, "nope" or "rope"'),
        ({"position_embedding_type": "rope", "rope_theta": None}, "rope_theta is null"),
        ({"mamba_d_head": 11}, "mamba_n_heads is 8; our mixers can do mamba_expand · hidden_size / mamba_d_head"),
    ],
    "nemotron_h": [
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M-ME"},
            'hybrid_override_pattern is "M-ME", so layer 3 is a mixture of experts; ours are dense',
        ),
        ({"layers_block_type": ["mamba", "moe"]}, "layers_block_type is .*, so layer 1 is a mixture of experts"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            r'hybrid_override_pattern is "MX"; our mixers can do linear_attention, .*, mlp \(in a pattern M, ',
        ),
        ({"layers_block_type": []}, r"layers_block_type is \[\]; our mixers can do linear_attention"),
        ({"num_hidden_layers": 52}, "num_hidden_layers is 52; our mixers can do 5, the number of kinds of layers"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true; our mixers can do false"),
        ({"mlp_hidden_act": "silu"}, 'mlp_hidden_act is "silu"; our mixers can do "relu2"'),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]"),
        ({"sliding_window": 7}, "sliding_window is 7, which hf_nemotron_h does not know"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases], ids=str
)
def test_configs_of_a_family_that_we_cannot_follow(name: str, changes: dict[str, Any], message: str):
    config = {"model_type": name, **CONFIGS[name], **changes}
    with pytest.raises(UserError, match=message):
        family_of(config, Path()).read(config)


def test_multipliers_of_granite_come_back():
    config = {"model_type": "granitemoehybrid", **GRANITE}
    family = family_of(config, Path())
    back = family.write(on_meta(family.read(config)))
    keys = [*MULTIPLIERS, "attention_multiplier", "layer_types", "shared_intermediate_size", "num_local_experts"]
    assert {key: back[key] for key in keys} == {key: GRANITE[key] for key in keys}
    assert back["position_embedding_type"] is None


def test_kinds_of_layers_of_nemotron_h_come_back():
    config = {"model_type": "nemotron_h", **NEMOTRON, "layers_block_type": None, "hybrid_override_pattern": "--M*M"}
    family = family_of(config, Path())
    back = family.write(on_meta(family.read(config)))
    kinds = ["mlp", "mlp", "linear_attention", "full_attention", "linear_attention"]
    assert back["layers_block_type"] == back["layer_types"] == kinds
    assert back["hybrid_override_pattern"] == "--M*M"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "to", "message"),
    [
        ((), "hf_qwen3_6", r"to: 'hf_qwen3_6' is not one of fla, huggingface, .*did you mean 'hf_qwen3_5'"),
        ((), "hf_qwen3_5", r"hf_qwen3_5 cannot hold this model: .*RMSNorm"),
        (("model.norm=ZeroCentredRMSNorm", "model.stack.mixer.gate=head"), "hf_qwen3_5", "cannot hold this model"),
        (("model.norm=SimpleRMSNorm",), "hf_llama", "cannot hold this model: .*RMSNorm"),
        (("model.norm=LayerNorm",), "hf_llama", r"cannot hold this model: .*LayerNorm"),
        (("model.stack.mixer.bias=true",), "hf_olmo_hybrid", "linear_attention and full_attention in one model"),
    ],
    ids=str,
)
def test_models_that_a_family_cannot_hold(overrides: tuple[str, ...], to: str, message: str):
    sizes = ("model.vocab_size=96", "model.hidden_size=48", "model.num_heads=4", "model.num_layers=2")
    model = zoo.build("transformer.yaml", *sizes, *overrides, device="meta")
    with pytest.raises(UserError, match=message):
        exported(model, TensorsInMemory(model.state_dict()), to)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("K.mixer.decay=BoundedChannelDecay",), "mixer.decay: BoundedChannelDecay instead of ChannelDecay"),
        (("K.mixer.full_rank_decay=true",), "mixer.full_rank_decay is True instead of False"),
        (("K.mixer.full_rank_gate=true",), "mixer.full_rank_gate is True instead of False"),
        (("A.gate=head",), "mixer.gate is head instead of None"),
        (("A.gate=channel",), "mixer.gate is channel instead of None"),
        (("A.rope_dim=0",), "qk_rope_head_dim is 0; our mixers can do 1 or more"),
    ],
    ids=str,
)
def test_options_of_kimi_k3_and_others_that_kimi_linear_lacks(overrides: tuple[str, ...], message: str):
    sizes = ("model.vocab_size=96", "model.hidden_size=48", "model.num_layers=4")
    changes = [f"model.stack.mixers.{override}" for override in overrides]
    model = zoo.build("kimi_linear.yaml", *sizes, *changes, device="meta")
    with pytest.raises(UserError, match=f"hf_kimi_linear cannot hold this model: .*{message}"):
        exported(model, TensorsInMemory(model.state_dict()), "hf_kimi_linear")
