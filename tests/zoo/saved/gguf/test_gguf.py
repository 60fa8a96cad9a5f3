"""GGUF files: their metadata, tensors and vocabulary, read back; and what no architecture of llama.cpp holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from torch import Tensor

import zoo
from kernels import UserError
from zoo.data.text.tokenizer import Tokenizer as Ours
from zoo.saved.gguf.vocabulary import fields_of

from . import models
from .models import CASES, QWEN2, TEXT, VOCABULARY, byte_level, divided, exported, split, tokenizers

gguf = pytest.importorskip("gguf")


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of a file."""
    reader = gguf.GGUFReader(file)
    return {name: field.contents() for name, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def turned(tensor: Tensor, heads: int) -> Tensor:
    """Rows of halves of heads, one from each in turn."""
    size = len(tensor) // heads
    return torch.stack(
        [tensor[h * size + i + half] for h in range(heads) for i in range(size // 2) for half in (0, size // 2)]
    )


def tiled(tensor: Tensor, groups: int, heads: int = 4) -> Tensor:
    """Rows of heads: the first of each group, then the second of each."""
    size, share = len(tensor) // heads, heads // groups
    return torch.cat([tensor[(g * share + i) * size :][:size] for i in range(share) for g in range(groups)])


def rwkv7(ours: dict[str, Tensor], model: zoo.LanguageModel) -> dict[str, Tensor]:
    """Return the tensors of a file of an RWKV-7, in llama.cpp's names."""
    head = ours["lm_head.weight"] if model.lm_head is not None else ours["embeddings.weight"]
    tensors = {"token_embd.weight": ours["embeddings.weight"], "output.weight": head}
    for part in ("weight", "bias"):
        tensors |= {
            f"output_norm.{part}": ours[f"norm.{part}"],
            f"token_embd_norm.{part}": ours[f"embedding_norm.{part}"],
        }
    projections = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    ranks = {"w": ("decay", "decay_bias"), "a": ("rate", "rate_bias"), "v": ("value", "value_bias"), "g": ("g", None)}
    for i in range(model.num_layers):
        m = {name.removeprefix(f"layers.{i}."): t for name, t in ours.items() if name.startswith(f"layers.{i}.")}
        layer = {f"time_mix_{new}": m[f"mixer.{old}.weight"] for new, old in projections.items()}
        layer |= {f"time_mix_{name}": m[f"mixer.{name}"] for name in ("k_k", "k_a", "r_k")}
        for letter, (low_rank, bias) in ranks.items():
            old, zero = (("rate", "rate_bias"), True) if (i, letter) == (0, "v") else ((low_rank, bias), False)
            parts = [None if old[1] is None else m[f"mixer.{old[1]}"]]
            parts += [m[f"mixer.{old[0]}.{part}.weight"] for part in ("down", "up")]
            named = {f"time_mix_{letter}{n}": part for n, part in enumerate(parts) if part is not None}
            layer |= {name: torch.zeros_like(part) for name, part in named.items()} if zero else named
        layer |= {"time_mix_lerp_fused": m["mixer.mix"][:, None, None], "channel_mix_lerp_k": m["mlp.mix"]}
        layer |= {f"channel_mix_{new}": m[f"mlp.{old}_proj.weight"] for new, old in (("key", "up"), ("value", "down"))}
        tensors |= {f"blk.{i}.{name}.weight": tensor for name, tensor in layer.items()}
        for new, old in (("attn_norm", "mixer_norm"), ("attn_norm_2", "mlp_norm"), ("time_mix_ln", "mixer.o_norm")):
            tensors |= {f"blk.{i}.{new}.{part}": m[f"{old}.{part}"].flatten() for part in ("weight", "bias")}
    return tensors


def expected(ours: dict[str, Tensor], model: zoo.LanguageModel, pairs: bool) -> dict[str, Tensor]:
    """The tensors of a file for our weights, in llama.cpp's names."""
    if "embedding_norm.weight" in ours:
        return rwkv7(ours, model)
    zero_centred = 1.0 if type(model.norm).__name__ == "ZeroCentredRMSNorm" else 0.0
    tensors = {"token_embd.weight": ours["embeddings.weight"], "output_norm.weight": ours["norm.weight"] + zero_centred}
    tensors |= {"output.weight": ours["lm_head.weight"]} if model.lm_head is not None else {}
    for i, mixer in enumerate(model.mixers):
        m = {name.removeprefix(f"layers.{i}."): t for name, t in ours.items() if name.startswith(f"layers.{i}.")}
        x = {name.removeprefix("mixer."): t for name, t in m.items()}
        layer = {"attn_norm.weight": m["mixer_norm.weight"] + zero_centred}
        if "mlp_norm.weight" in m:
            norm = "post_attention_norm" if zero_centred else "ffn_norm"
            layer |= {
                f"{norm}.weight": m["mlp_norm.weight"] + zero_centred,
                "ffn_down.weight": m["mlp.down_proj.weight"],
            }
            layer |= {f"ffn_{part}.weight": m[f"mlp.in_proj.{part}.weight"] for part in ("gate", "up")}
        kind = type(mixer).__name__
        if kind == "SoftmaxAttention":
            order = turned if pairs else lambda tensor, heads: tensor
            for part in ("weight", "bias"):
                if f"in_proj.q.{part}" in x:
                    q, k = x[f"in_proj.q.{part}"], x[f"in_proj.k.{part}"]
                    if zero_centred:
                        q = torch.cat(
                            [q.unflatten(0, (4, -1)), x[f"in_proj.g.{part}"].unflatten(0, (4, -1))], 1
                        ).flatten(0, 1)
                    layer |= {f"attn_q.{part}": order(q, 4), f"attn_k.{part}": order(k, mixer.num_kv_heads)}
                    layer |= {f"attn_v.{part}": x[f"in_proj.v.{part}"]}
                if f"o_proj.{part}" in x:
                    layer |= {f"attn_output.{part}": x[f"o_proj.{part}"]}
            if zero_centred:
                layer |= {f"attn_{s}_norm.weight": x[f"{s}_norm.weight"] + 1 for s in "qk"}
        elif kind == "GatedDeltaNet":
            groups = mixer.num_key_heads
            layer |= {
                "attn_qkv.weight": torch.cat(
                    [x[f"in_proj.{s}.weight"] for s in "qk"] + [tiled(x["in_proj.v.weight"], groups)]
                ),
                "ssm_conv1d.weight": torch.cat(
                    [x[f"{s}_features.weight"] for s in "qk"] + [tiled(x["v_features.weight"], groups)]
                )[:, 0],
                "attn_gate.weight": tiled(x["in_proj.g.weight"], groups),
                "ssm_alpha.weight": tiled(x["in_proj.a.weight"], groups),
                "ssm_beta.weight": tiled(x["in_proj.b.weight"], groups),
                "ssm_a": -tiled(x["decay.A_log"], groups).exp(),
                "ssm_dt.bias": tiled(x["decay.dt_bias"], groups),
                "ssm_norm.weight": x["o_norm.weight"],
                "ssm_out.weight": tiled(x["o_proj.weight"].T, groups).T,
            }
        elif kind == "KDA":
            layer |= {f"attn_{s}.weight": x[f"in_proj.{s}.weight"] for s in "qkv"}
            layer |= {f"ssm_conv1d_{s}.weight": x[f"{s}_features.weight"][None] for s in "qkv"}
            layer |= {
                "ssm_f_a.weight": x["in_proj.f.weight"],
                "ssm_f_b.weight": x["decay_up.weight"],
                "ssm_beta.weight": x["in_proj.b.weight"],
                "ssm_a": -x["decay.A_log"].exp().view(1, 1, -1, 1),
                "ssm_dt.bias": x["decay.dt_bias"],
                "ssm_g_a.weight": x["in_proj.g.weight"],
                "ssm_g_b.weight": x["g_up.weight"],
                "ssm_norm.weight": x["o_norm.norm.weight"],
                "attn_output.weight": x["o_proj.weight"],
            }
        elif kind == "MultiheadLatentAttention":
            keys, values = x["kv_up.weight"].view(4, 16 + 24, -1).split([16, 24], 1)
            layer |= {
                "attn_q.weight": x["in_proj.q.weight"],
                "attn_kv_a_mqa.weight": torch.cat([x["in_proj.latent.weight"], x["in_proj.shared.weight"]]),
                "attn_kv_a_norm.weight": x["latent_norm.weight"],
                "attn_k_b.weight": keys.transpose(1, 2),
                "attn_v_b.weight": values,
                "attn_output.weight": x["o_proj.weight"],
            }
        elif kind == "Mamba2":
            layer |= {
                "ssm_in.weight": torch.cat([x[f"in_proj.{s}.weight"] for s in ("z", "x", "B", "C", "dt")]),
                "ssm_conv1d.weight": torch.cat([x[f"{s}_features.weight"] for s in "vkq"])[:, 0],
                "ssm_conv1d.bias": torch.cat([x[f"{s}_features.bias"] for s in "vkq"]),
                "ssm_a": -x["decay.A_log"].exp()[:, None],
                "ssm_d": x["D"][:, None],
                "ssm_dt.bias": x["decay.dt_bias"],
                "ssm_norm.weight": x["norm.weight"].reshape(2, -1),
                "ssm_out.weight": x["out_proj.weight"],
            }
        else:
            layer |= {
                "ssm_in.weight": torch.cat([x["in_proj.x.weight"], x["in_proj.z.weight"]]),
                "ssm_conv1d.weight": x["x_features.weight"][:, 0],
                "ssm_conv1d.bias": x["x_features.bias"],
                "ssm_x.weight": torch.cat([x[f"x_proj.{s}.weight"] for s in ("dt", "B", "C")]),
                "ssm_dt.weight": x["dt_proj.weight"],
                "ssm_dt.bias": x["dt_bias"],
                "ssm_a": -x["A_log"].exp(),
                "ssm_d": x["D"],
                "ssm_out.weight": x["out_proj.weight"],
            }
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    rotary = getattr(getattr(model.mixers[0], "q_features", None), "map", None)
    if type(rotary).__name__ == "Llama3Rotary":
        pair = torch.arange(8.0)
        tensors["rope_freqs.weight"] = 10000 ** (-pair / 8) / rotary.frequencies(pair)
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_ours_to_the_bit(case: str, tmp_path: Path):
    folder = exported(tmp_path / "ours", case)
    metadata, tensors = read(zoo.convert(folder, tmp_path / "model.gguf", to="gguf"))
    architecture = CASES[case][0]
    assert metadata["general.architecture"] == architecture
    assert metadata[f"{architecture}.block_count"] == zoo.load(folder).num_layers
    model = zoo.load(folder)
    wanted = expected(model.state_dict(), model, pairs=architecture == "llama")
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensors[name].data, tensor.numpy(), err_msg=name)


def test_metadata_of_sizes_and_of_the_vocabulary(tmp_path: Path):
    folder = exported(tmp_path / "ours", "qwen3.5")
    metadata, _ = read(zoo.convert(folder, tmp_path / "small.gguf", to="gguf"))
    sizes = {
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "vocab_size": VOCABULARY,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.recurrent_layers": [True, True, True, False],
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.dimension_count": 8,
        "rope.freq_base": 1e6,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
        "ssm.group_count": 2,
    }
    assert {key: metadata[f"qwen35.{key}"] for key in sizes} == sizes
    tokenizer = zoo.load_tokenizer(folder)
    assert metadata["general.name"] == "small"
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.bos_token_id"] == tokenizer.eos_id
    assert metadata["tokenizer.ggml.eot_token_id"] == tokenizer.stop_ids[1]
    assert (metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.add_eos_token"]) == (False, False)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == len(set(tokens)) == VOCABULARY
    named = {token: gguf.TokenType(kind).name for token, kind in zip(tokens, kinds, strict=True)}
    special = {"<eos>": "CONTROL", "<turn>": "CONTROL", "12345": "USER_DEFINED", "unused 299": "UNUSED", "Ġ": "NORMAL"}
    assert {token: named[token] for token in special} == special
    assert metadata["tokenizer.ggml.merges"][0].count(" ") == 1


def test_metadata_of_scaled_positions(tmp_path: Path):
    prefix, scaling = "llama.rope.scaling.", {}
    for case in ("divided", "of YaRN", "of Llama 3.1"):
        file = zoo.convert(exported(tmp_path / case, f"llama, positions {case}"), tmp_path / f"{case}.gguf", to="gguf")
        metadata = {key.removeprefix(prefix): value for key, value in read(file)[0].items() if key.startswith(prefix)}
        scaling[case] = metadata
    assert scaling == {
        "divided": {"type": "linear", "factor": 3.0},
        "of YaRN": {
            "type": "yarn",
            "factor": 3.0,
            "original_context_length": 200,
            "attn_factor": pytest.approx(1.2 / (1 + 0.1 * np.log(3))),
        },
        "of Llama 3.1": {},
    }


def test_metadata_of_kimi_linear(tmp_path: Path):
    metadata, _ = read(zoo.convert(exported(tmp_path / "ours", "kimi linear"), tmp_path / "a.gguf", to="gguf"))
    sizes = {
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 0, 0, 1],
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 24,
        "attention.kv_lora_rank": 32,
        "rope.dimension_count": 8,
        "ssm.conv_kernel": 4,
        "kda.head_dim": 32,
        "leading_dense_block_count": 4,
    }
    assert {key: metadata[f"kimi-linear.{key}"] for key in sizes} == sizes


def test_metadata_of_rwkv7(tmp_path: Path):
    file = zoo.convert(exported(tmp_path / "ours", "rwkv7, tied"), tmp_path / "a.gguf", to="gguf", quantize="q8_0")
    metadata, tensors = read(file)
    sizes = {
        "wkv.head_size": 64,
        "attention.layer_norm_epsilon": pytest.approx(1e-5),
        "attention.decay_lora_rank": 16,
        "attention.iclr_lora_rank": 16,
        "attention.value_residual_mix_lora_rank": 8,
        "attention.gate_lora_rank": 64,
        "token_shift_count": 2,
    }
    assert {key: metadata[f"rwkv7.{key}"] for key in sizes} == sizes
    small = {name for name, tensor in tensors.items() if len(tensor.shape) > 1 and tensor.tensor_type.name == "F32"}
    assert {name.partition("time_mix_")[2][:2] for name in small} == {f"{x}{n}" for x in "wavg" for n in "12"} | {"le"}


@pytest.mark.parametrize(("name", "number_type"), [("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_matrices_have_the_type_asked_for(name: str, number_type: str, tmp_path: Path):
    folder = exported(tmp_path / "ours", "mamba2")
    metadata, tensors = read(zoo.convert(folder, tmp_path / "model.gguf", to="gguf", quantize=name))
    whole = read(zoo.convert(folder, tmp_path / "whole.gguf", to="gguf", quantize="f32"))[1]
    assert metadata["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{number_type}"]
    matrices = {name for name in tensors if name.endswith(("embd.weight", "output.weight", "in.weight", "out.weight"))}
    assert len(matrices) == 8
    for name, tensor in tensors.items():
        assert tensor.tensor_type.name == (number_type if name in matrices else "F32"), name
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        closeness = 1e-2 * np.abs(whole[name].data).max() if name in matrices else 0
        np.testing.assert_allclose(numbers, whole[name].data, rtol=0, atol=closeness)


def test_stored_dtypes_are_kept(tmp_path: Path):
    folder = exported(tmp_path / "ours", "llama", dtype=torch.bfloat16)
    _, tensors = read(zoo.convert(folder, tmp_path / "a.gguf", to="gguf"))
    assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.BF16
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    weights = zoo.load(folder).embeddings.weight
    numbers = gguf.quants.dequantize(tensors["token_embd.weight"].data, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(numbers, weights.detach().float().numpy())


def test_rows_without_whole_blocks_are_f16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(models.SIZES, "intermediate_size", 72)
    folder = exported(tmp_path / "ours", "llama")
    _, tensors = read(zoo.convert(folder, tmp_path / "a.gguf", to="gguf", quantize="q8_0"))
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"


REFUSED = {
    "GLA": (models.uniform("GLA"), {}, "no family of gguf has layers of GLA; each has some of GatedDeltaNet, KDA, "),
    "a window": (
        models.uniform("SlidingWindowAttention", num_heads=4, window_size=8, **models.ROTARY),
        {},
        "llama.cpp's llama cannot hold this model: its attention has no sliding window, and here one has 8 tokens",
    ),
    "positions of Llama 3.1": (
        models.uniform(
            "SoftmaxAttention",
            **dict(num_heads=4, bias=True, output_bias=False),
            qk={"map": models.component("Llama3Rotary", factor=2.0, original_length=30)},
        ),
        {},
        "qwen2 cannot hold this model: it has no positions scaled as in Llama 3.1",
    ),
    "another YaRN": (
        models.scaled("YarnRotary", original_length=200, fast_turns=16.0),
        {},
        "llama.cpp's YaRN has beta_fast 32.0, and this model's positions have 16.0",
    ),
    "embeddings without a norm": (
        models.uniform("RWKV7"),
        {**models.RWKV7, "embedding_norm": False},
        "rwkv7 cannot hold this model: it norms embeddings, and this model does not; train with model.embedding_norm",
    ),
    "Kimi Linear without attention": (
        models.kimi("L"),
        {"norm_eps": 1e-6},
        "kimi-linear .*: it needs linear layers and attention layers, and here all are of one kind",
    ),
    "Kimi Linear with the published eps": (
        models.kimi("LA", 1e-5),
        {"norm_eps": 1e-5},
        "kimi-linear .* norms keys and latents with the eps of all norms, which is 1e-05 here instead of 1e-06",
    ),
    "narrow heads": (
        models.uniform("SoftmaxAttention", num_heads=2, head_dim=16, bias=True, output_bias=False, **models.ROTARY),
        {},
        "qwen2 cannot hold this model: its heads together are as wide as the model, and here 32 and 64 channels",
    ),
    "wide mamba": (models.uniform("Mamba1", expand=4), {"mlp": None}, "mamba cannot .* and expand is 4"),
    "no bias": (
        models.uniform("Mamba1", conv_bias=False),
        {"mlp": None},
        "mamba cannot hold this model: its convolution has a bias, which this model lacks",
    ),
    "values of another size": (
        models.hybrid("LA", value_dim=32),
        models.QWEN,
        "qwen35 cannot hold this model: its keys and values have one size, and here 16 and 32",
    ),
    "linear layers only": (models.hybrid("L"), models.QWEN, "qwen35 .*: it needs a layer of attention, and all are"),
    "another eps": (
        models.hybrid("LA", 1e-5),
        {**models.QWEN, "norm_eps": 1e-5},
        "qwen35 cannot .* norms keys with the eps of all norms, which is 1e-05 here instead of 1e-06",
    ),
    "an expanded state": (
        models.uniform("Expanded", factor=2, mixer="Mamba2"),
        {},
        "hf_mamba2 cannot hold .*subheads is 2 instead of 1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_architecture_holds(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stack, keys, message = REFUSED[case]
    monkeypatch.setitem(CASES, case, ("", stack, keys))
    with pytest.raises(UserError, match=message):
        zoo.convert(exported(tmp_path / "ours", case), tmp_path / "model.gguf", to="gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_an_output_is_replaced_only_by_request(tmp_path: Path):
    folder, file = exported(tmp_path / "ours", "llama"), tmp_path / "new" / "model.gguf"
    zoo.convert(folder, file, to="gguf")
    written = file.read_bytes()
    with pytest.raises(UserError, match="exists already and is a GGUF file; choose another, or replace it"):
        zoo.convert(folder, file, to="gguf")
    assert zoo.convert(folder, file, to="gguf", overwrite=True).read_bytes() == written
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    file.write_text("notes")
    with pytest.raises(UserError, match="is a file, which is never replaced"):
        zoo.convert(folder, file, to="gguf", overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "too_large"), [("f16", 70_000.0), ("q8_0", 9e6)])
def test_a_value_that_its_type_cannot_hold(quantize: str, too_large: float, tmp_path: Path, caplog):
    folder = exported(tmp_path / "ours", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["layers.0.mlp.down_proj.weight"][0, 0] = too_large
    save_file(weights, folder / "model.safetensors")
    (folder / "hashes.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=rf"^quantize: {quantize} holds values up to .*; use bf16 or f32"):
        zoo.convert(folder, tmp_path / "model.gguf", to="gguf", quantize=quantize)
    assert not (tmp_path / "model.gguf").exists()
    zoo.convert(folder, tmp_path / "model.gguf", to="gguf", quantize="bf16")
    assert "not finite" not in caplog.text
    weights["layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors")
    zoo.convert(folder, tmp_path / "nan.gguf", to="gguf", quantize="bf16")
    assert "has 1 values that are not finite" in caplog.text


def test_types_are_checked_before_anything_is_read(tmp_path: Path):
    with pytest.raises(UserError, match="quantize: 'q8' is not one of f32, f16, bf16, q8_0; did you mean 'q8_0'"):
        zoo.convert(tmp_path, tmp_path / "a", to="gguf", quantize="q8")
    with pytest.raises(UserError, match="quantize: f16 is for to=gguf only"):
        zoo.convert(tmp_path, tmp_path / "a", to="fla", quantize="f16")


def test_without_a_tokenizer(tmp_path: Path):
    folder = exported(tmp_path / "ours", "llama")
    (folder / "tokenizer.json").unlink()
    metadata, _ = read(zoo.convert(folder, tmp_path / "a.gguf", to="gguf"))
    assert (metadata["tokenizer.ggml.model"], metadata["llama.vocab_size"]) == ("none", VOCABULARY)
    assert "tokenizer.ggml.tokens" not in metadata


# the vocabulary


def name_of(tokenizer: Tokenizer) -> str:
    return fields_of(Ours(tokenizer), VOCABULARY)["tokenizer.ggml.pre"]


def test_pre_tokenizers_with_a_name():
    for name, made in tokenizers().items():
        assert name_of(made) == name


def test_pre_tokenizers_without_one():
    refused = {
        r"does not take words .* without merges, and divides text by \\s\+": divided(split(r"\s+")),
        "takes words of the vocabulary without merges, and divides": divided(split(QWEN2), ignore_merges=True),
        "its last step before merges is .*ByteLevel": divided(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "its last step before merges is .*Whitespace": divided(pre_tokenizers.Whitespace()),
        'divides text by {"type": "Punctuation"': divided(
            pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)])
        ),
    }
    lower, folded, stripped = byte_level(), byte_level(), byte_level()
    lower.normalizer = normalizers.Lowercase()
    folded.model.byte_fallback = True
    stripped.add_tokens([AddedToken("<left>", lstrip=True)])
    refused |= {
        "it has the normalizer Lowercase": lower,
        "its model has byte_fallback": folded,
        "the added token '<left>' has lstrip": stripped,
    }
    for message, tokenizer in refused.items():
        with pytest.raises(UserError, match=f"no pre-tokenizer of llama.cpp equals that .*: .*{message}"):
            name_of(tokenizer)


def test_a_tokenizer_larger_than_the_model():
    with pytest.raises(UserError, match=r"the tokenizer has \d+ tokens, and the model 280"):
        fields_of(Ours(byte_level()), 280)


def test_composed_characters_are_left_to_the_user(caplog: pytest.LogCaptureFixture):
    made = byte_level()
    made.normalizer = normalizers.NFC()
    assert name_of(made) == "gpt-2"
    assert "composes characters (NFC) and llama.cpp does not" in caplog.text


# llama.cpp itself


@pytest.mark.nightly
@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_our_logits(case: str, tmp_path: Path):
    library = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    folder = exported(tmp_path / "ours", case)
    file = zoo.convert(folder, tmp_path / "model.gguf", to="gguf")
    theirs = library.Llama(
        str(file), n_ctx=512, logits_all=True, type_k=0, type_v=0, flash_attn=False, n_threads=1, verbose=False
    )
    model, tokenizer = zoo.load(folder), zoo.load_tokenizer(folder)
    for text in (TEXT, "a", "  <eos> <turn> 12345!\r\n\r\n   x", "'S it’s ÅÅ 字字 😀 ١٢٣ \u3000"):
        tokens = tokenizer.encode(text)
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == tokens
        assert theirs.detokenize(tokens, special=True).decode() == text
        theirs.reset()
        theirs.eval(tokens)
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0][0]
        scores = torch.from_numpy(theirs.scores[: len(tokens)])
        torch.testing.assert_close(scores, logits, rtol=0, atol=5e-5 * logits.abs().max().item())
