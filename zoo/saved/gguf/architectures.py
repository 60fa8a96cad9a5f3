"""llama.cpp's architectures: the metadata and tensors of each, from those of the public layout it corresponds to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import UserError
from zoo.saved.public.family import Config

Value = int | float | list[int] | list[bool]
_L2_EPS = 1e-6  # under the root of the keys' norm, in transformers and here


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: Its name there.
        metadata: The contents of config.json → its metadata, under names without the architecture's. A UserError if its
            graph computes something else.
        tensor: The contents of config.json, a tensor's name in the public layout without the layer's, and the tensor in
            fp32 → the tensor as the architecture stores it.
    """

    name: str
    metadata: Callable[[Config], dict[str, Value]]
    tensor: Callable[[Config, str, Tensor], Tensor]


def _refuse(architecture: str, reason: str) -> UserError:
    return UserError(f"to: llama.cpp's {architecture} cannot hold this model: {reason}.")


def _transformer(config: Config) -> dict[str, Value]:
    """The metadata of attention and SwiGLU, with rotary positions over whole heads."""
    head_dim, scaling = config["head_dim"], config["rope_parameters"]["rope_type"]
    if scaling != "default":
        raise UserError(f"to: gguf holds rotary positions without scaling, and this model's are scaled by {scaling}.")
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
    }


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


def _qwen2(config: Config) -> dict[str, Value]:
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
    return {
        **_recurrent(config),
        "ssm.time_step_rank": config["num_heads"],
        "ssm.group_count": config["n_groups"],
    }


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
    if config["attention_bias"]:
        raise _refuse("qwen35", "its attention has no biases")
    sizes = {size: config[f"linear_{size}_head_dim"] for size in ("key", "value")}
    if any(recurrent) and sizes["key"] != sizes["value"]:
        raise _refuse(
            "qwen35",
            f"its keys and values have one size, and here {sizes['key']} and {sizes['value']}",
        )
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


# the name of a family → the architecture that computes the same
ARCHITECTURES: Mapping[str, Architecture] = {
    "hf_llama": Architecture("llama", _transformer, _rotary_in_pairs),
    "hf_mistral": Architecture("llama", _mistral, _rotary_in_pairs),
    "hf_qwen2": Architecture("qwen2", _qwen2, _unchanged),
    "hf_mamba": Architecture("mamba", _mamba, _mamba_tensor),
    "hf_mamba2": Architecture("mamba2", _mamba2, _mamba2_tensor),
    "hf_qwen3_5": Architecture("qwen35", _qwen35, _qwen35_tensor),
}
