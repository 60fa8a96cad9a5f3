"""llama.cpp's architectures: the metadata and tensors of each, from those of the public layout it corresponds to."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import UserError
from mixers import Llama3Rotary, Rotary
from zoo.saved.public.families.rotary import rotary_map
from zoo.saved.public.family import TIED, Config

Value = int | float | str | list[int] | list[bool]
_L2_EPS = 1e-6  # under the root of the keys' norm, in transformers and here


class Stored(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: A name that the package `gguf` maps to llama.cpp's, or llama.cpp's own.
        sources: The tensors of the public layout that it is made from.
        make: Those tensors in fp32 → the tensor as the architecture stores it.
    """

    name: str
    sources: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: Its name there.
        metadata: The contents of config.json → its metadata, under names without the architecture's. A UserError if its
            graph computes something else.
        tensors: The contents of config.json, and a tensor's name in the public layout → the tensors of the file that
            are written in its place.
    """

    name: str
    metadata: Callable[[Config], dict[str, Value]]
    tensors: Callable[[Config, str], list[Stored]]


def _one_by_one(tensor: Callable[[Config, str, Tensor], Tensor]) -> Callable[[Config, str], list[Stored]]:
    """Return the `tensors` of an architecture in which each public tensor has one counterpart."""
    return lambda config, name: [Stored(name, (name,), partial(tensor, config, name))]


def _refuse(architecture: str, reason: str) -> UserError:
    return UserError(f"to: llama.cpp's {architecture} cannot hold this model: {reason}.")


def _transformer(config: Config) -> dict[str, Value]:
    """The metadata of attention and SwiGLU, with rotary positions over whole heads."""
    head_dim = config["head_dim"]
    return {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config["rope_theta"]),
        **_rotary_scaling(config["rope_parameters"]),
    }


def _rotary_scaling(rotary: Config) -> dict[str, Value]:
    """The metadata of scaled positions. Those of Llama 3 are a tensor, which only `llama` reads."""
    kind = rotary["rope_type"]
    if kind not in ("linear", "yarn"):
        return {}
    factor = float(rotary["factor"])
    scaling: dict[str, Value] = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "linear":
        return scaling
    for key, fixed in (("beta_slow", 1.0), ("beta_fast", 32.0), ("truncate", True)):
        if rotary[key] != fixed:
            raise UserError(f"to: llama.cpp's YaRN has {key} {fixed}, and this model's positions have {rotary[key]}.")
    return {
        **scaling,
        "rope.scaling.original_context_length": rotary["original_max_position_embeddings"],
        # llama.cpp multiplies it by the amplitude that follows from the factor
        "rope.scaling.attn_factor": rotary["attention_factor"] / (1 + 0.1 * math.log(max(factor, 1.0))),
    }


def _no_llama3(architecture: str, config: Config) -> None:
    if config["rope_parameters"]["rope_type"] == "llama3":
        raise _refuse(architecture, "it has no positions scaled as in Llama 3.1")


def _recurrent(config: Config) -> dict[str, Value]:
    """The metadata of Mamba and Mamba2."""
    return {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": float(config["layer_norm_epsilon"]),
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["expand"] * config["hidden_size"],
        "ssm.state_size": config["state_size"],
    }


def _mistral(config: Config) -> dict[str, Value]:
    if (window := config["sliding_window"]) is not None:
        raise _refuse("llama", f"its attention has no sliding window, and here one has {window} tokens")
    return _transformer(config)


def _rotary_in_pairs(config: Config, name: str, tensor: Tensor) -> Tensor:
    """Order the rows of queries and keys so that channels that turn together are neighbours, not half a head apart."""
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f"self_attn.{projection}." in name:
            return tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _llama_tensors(config: Config, name: str) -> list[Stored]:
    tensors = [Stored(name, (name,), partial(_rotary_in_pairs, config, name))]
    if name == "model.norm.weight" and config["rope_parameters"]["rope_type"] == "llama3":
        tensors.append(Stored("rope.freqs.weight", (), partial(_llama3_divisors, config)))
    return tensors


def _llama3_divisors(config: Config) -> Tensor:
    """Return the divisor of the frequency of each pair [head_dim/2]."""
    turning = rotary_map(config)
    assert turning is not None
    rotary = Llama3Rotary(1, config["head_dim"], **turning["init_args"])
    pair = torch.arange(rotary.turning // 2, dtype=torch.float32)
    return Rotary.frequencies(rotary, pair) / rotary.frequencies(pair)


def _qwen2(config: Config) -> dict[str, Value]:
    _no_llama3("qwen2", config)
    if config["use_sliding_window"]:
        raise _refuse(
            "qwen2", f"its attention has no sliding window, and here one has {config['sliding_window']} tokens"
        )
    width, model = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    if width != model:
        raise _refuse("qwen2", f"its heads together are as wide as the model, and here {width} and {model} channels")
    return _transformer(config)


def _unchanged(config: Config, name: str, tensor: Tensor) -> Tensor:
    return tensor


def _mamba(config: Config) -> dict[str, Value]:
    _check_convolution("mamba", config)
    if config["expand"] != 2:
        raise _refuse("mamba", f"its layers are twice as wide as the model, and expand is {config['expand']}")
    return {**_recurrent(config), "ssm.time_step_rank": config["time_step_rank"]}


def _mamba2(config: Config) -> dict[str, Value]:
    _check_convolution("mamba2", config)
    return {**_recurrent(config), "ssm.time_step_rank": config["num_heads"], "ssm.group_count": config["n_groups"]}


def _check_convolution(architecture: str, config: Config) -> None:
    if not config["use_conv_bias"]:
        raise _refuse(architecture, "its convolution has a bias, which this model lacks")


def _mamba_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    return _rates(name, tensor)


def _mamba2_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    if name.endswith((".A_log", ".D")):
        return _rates(name, tensor)[:, None]
    if name.endswith("mixer.norm.weight"):
        return tensor.unflatten(0, (config["n_groups"], -1))
    return _mamba_tensor(config, name, tensor)


def _rates(name: str, tensor: Tensor) -> Tensor:
    """Return decay rates in place of their logarithms; other tensors stay."""
    return -tensor.exp() if name.endswith(".A_log") else tensor


def _qwen35(config: Config) -> dict[str, Value]:
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    if all(recurrent):  # it aborts while it allocates an empty cache
        raise _refuse("qwen35", "it needs a layer of attention, and all are linear")
    _no_llama3("qwen35", config)
    if config["attention_bias"]:
        raise _refuse("qwen35", "its attention has no biases")
    sizes = {size: config[f"linear_{size}_head_dim"] for size in ("key", "value")}
    if any(recurrent) and sizes["key"] != sizes["value"]:
        raise _refuse("qwen35", f"its keys and values have one size, and here {sizes['key']} and {sizes['value']}")
    if any(recurrent) and config["rms_norm_eps"] != _L2_EPS:
        raise _refuse(
            "qwen35",
            f"it norms keys with the eps of all norms, which is {config['rms_norm_eps']:g} here instead of {_L2_EPS:g}",
        )
    return {
        **_transformer(config),
        "rope.dimension_count": round(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],  # of images; text has the same position in each
        "attention.recurrent_layers": recurrent,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.inner_size": config["linear_num_value_heads"] * sizes["value"],
        "ssm.state_size": sizes["key"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.group_count": config["linear_num_key_heads"],
    }


def _qwen35_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1  # zero-centred
    if "linear_attn." not in name:
        return tensor
    tensor = _rates(name, tensor.squeeze(1) if "conv1d" in name else tensor)
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    keys = 2 * groups * config["linear_key_head_dim"]
    if "linear_attn.norm." in name or heads == groups:
        return tensor
    if "out_proj" in name:
        return _by_place(tensor.T, heads, groups).T
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat([tensor[:keys], _by_place(tensor[keys:], heads, groups)])
    return _by_place(tensor, heads, groups)


def _by_place(rows: Tensor, heads: int, groups: int) -> Tensor:
    """Order the rows of heads by their place in a group, then by group: head h then reads key h modulo `groups`."""
    return rows.unflatten(0, (groups, heads // groups, -1)).transpose(0, 1).flatten(0, 2)


def _rwkv7(config: Config) -> dict[str, Value]:
    head, eps = config["head_dim"], config["norm_eps"]
    if not config["norm_first"]:
        raise _refuse("rwkv7", "it norms embeddings, and this model does not; train with model.embedding_norm")
    if head % _RWKV7_HEAD or not math.isclose(eps * head, _RWKV7_EPS):
        raise _refuse(
            "rwkv7",
            f"its heads have a multiple of {_RWKV7_HEAD} channels and norms with an eps of {_RWKV7_EPS:g}, and here "
            f"they have {head} channels and {eps * head:g}",
        )
    return {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": float(eps),
        "wkv.head_size": head,
        "token_shift_count": 2,
        **{f"attention.{theirs}_lora_rank": config[f"{ours}_low_rank_dim"] for theirs, ours in _RWKV7_RANKS.items()},
    }


_RWKV7_HEAD = 64  # channels of a head that its vectors of 512 bits divide, counted fourfold
_RWKV7_EPS = 64e-5  # of the norm of each head
_RWKV7_RANKS = {"decay": "decay", "iclr": "a", "value_residual_mix": "v", "gate": "gate"}
_RWKV7_MIXES = "rwkvag"  # in the order of its fused tensor
# public names → those that gguf maps, one after another
_RWKV7_NAMES = (
    (r"\.layers\.0\.pre_norm\.", ".pre_ln."),
    (r"\.attn_norm\.", ".ln1."),
    (r"\.ffn_norm\.", ".ln2."),
    (r"\.attn\.g_norm\.", ".attention.ln_x."),
    (r"\.attn\.(.)_lora\.lora\.0\.weight", r".attention.\g<1>1.weight"),
    (r"\.attn\.(.)_lora\.lora\.2\.weight", r".attention.\g<1>2.weight"),
    (r"\.attn\.(.)_lora\.lora\.2\.bias", r".attention.\g<1>0.weight"),
    (r"\.attn\.([rk]_[ka])$", r".attention.\1.weight"),
    (r"\.attn\.", ".attention."),
    (r"\.ffn\.x_k$", ".feed_forward.x_k.weight"),
    (r"\.ffn\.", ".feed_forward."),
)


def _rwkv7_tensors(config: Config, name: str) -> list[Stored]:
    if (mix := re.fullmatch(r"(model\.layers\.\d+\.)attn\.x_(.)", name)) is not None:
        if mix[2] != _RWKV7_MIXES[0]:
            return []  # part of the tensor that is written for the first
        sources = tuple(f"{mix[1]}attn.x_{part}" for part in _RWKV7_MIXES)
        fused = f"blk.{mix[1].split('.')[2]}.time_mix_lerp_fused.weight"
        return [Stored(fused, sources, lambda *mixes: torch.stack(mixes).view(len(mixes), 1, 1, -1))]
    new = name
    for pattern, replacement in _RWKV7_NAMES:
        new = re.sub(pattern, replacement, new)
    tensors = [Stored(new, (name,), lambda tensor: tensor.flatten() if name.endswith("r_k") else tensor)]
    if (rate := re.fullmatch(r"model\.layers\.0\.attention\.a(\d\.weight)", new)) is not None:
        # the lowest layer has no values before it, but llama.cpp loads their projections there
        tensors.append(Stored(f"model.layers.0.attention.v{rate[1]}", (name,), torch.zeros_like))
    if name == "model.embeddings.weight" and config[TIED]:
        tensors.append(Stored("lm_head.weight", (name,), lambda tensor: tensor))
    return tensors


def _kimi(config: Config) -> dict[str, Value]:
    full = [kind == "full_attention" for kind in config["layer_types"]]
    if len(set(full)) == 1:  # it aborts while it allocates the state or cache that is missing
        raise _refuse("kimi-linear", "it needs linear layers and attention layers, and here all are of one kind")
    if config["rms_norm_eps"] != _L2_EPS:
        raise _refuse(
            "kimi-linear",
            f"it norms keys and latents with the eps of all norms, which is {config['rms_norm_eps']:g} here instead of "
            f"{_L2_EPS:g}",
        )
    heads = config["num_attention_heads"]
    if config["linear_num_heads"] != heads:
        raise _refuse(
            "kimi-linear", f"all layers have one number of heads, and here {config['linear_num_heads']} and {heads}"
        )
    rank, shared, count = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_hidden_layers"]
    return {
        "embedding_length": config["hidden_size"],
        "block_count": count,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        # it attends to latents, which all heads share; 0 makes a layer linear
        "attention.head_count_kv": [int(layer) for layer in full],
        "attention.key_length": rank + shared,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": shared,  # only their number: they do not turn
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        # all layers are dense, but llama.cpp asks for the sizes of experts
        "leading_dense_block_count": count,
        "expert_feed_forward_length": 0,
        "expert_shared_count": 0,
        "expert_gating_func": 2,
    }


def _kimi_tensors(config: Config, name: str) -> list[Stored]:
    if name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]

        def part(index: int, tensor: Tensor) -> Tensor:
            return tensor.unflatten(0, (config["num_attention_heads"], -1)).split(sizes, 1)[index]

        return [
            Stored(name.replace("kv_b", "k_b"), (name,), lambda tensor: part(0, tensor).transpose(1, 2)),
            Stored(name.replace("kv_b", "v_b"), (name,), partial(part, 1)),
        ]
    convolution = name.endswith("conv1d.weight")
    return [Stored(name, (name,), lambda tensor: tensor.unsqueeze(0) if convolution else _rates(name, tensor))]


# the name of a family → the architecture that computes the same
ARCHITECTURES: Mapping[str, Architecture] = {
    "fla_rwkv7": Architecture("rwkv7", _rwkv7, _rwkv7_tensors),
    "hf_llama": Architecture("llama", _transformer, _llama_tensors),
    "hf_mistral": Architecture("llama", _mistral, _llama_tensors),
    "hf_qwen2": Architecture("qwen2", _qwen2, _one_by_one(_unchanged)),
    "hf_mamba": Architecture("mamba", _mamba, _one_by_one(_mamba_tensor)),
    "hf_mamba2": Architecture("mamba2", _mamba2, _one_by_one(_mamba2_tensor)),
    "hf_qwen3_5": Architecture("qwen35", _qwen35, _one_by_one(_qwen35_tensor)),
    "hf_kimi_linear": Architecture("kimi-linear", _kimi, _kimi_tensors),
}
