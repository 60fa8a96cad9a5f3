"""llama.cpp's architectures: the metadata and tensors of each, from those of the public layout it corresponds to."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import UserError
from mixers import Llama3Rotary, Rotary
from zoo.saved.public.families.rotary import ROTARY_KEYS, rotary_map
from zoo.saved.public.family import TIED, Config

Value = int | float | str | list[int] | list[bool]
Metadata = Mapping[str, Any]  # under names without the architecture's
_NEAR = 1e-3
_LAYER_TYPES = ("linear_attention", "full_attention")
_L2_EPS = 1e-6  # under the root of the keys' norm, in transformers and here


class Change(NamedTuple):
    """A change of each number of a tensor, and the way back."""

    do: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor], Tensor]


SAME = Change(lambda x: x, lambda x: x)
RATES = Change(lambda x: -x.exp(), lambda x: (-x).log())  # decay rates in place of their logarithms
PLUS_ONE = Change(lambda x: x + 1, lambda x: x - 1)  # of zero-centred norms


class Stored(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: A name that the package `gguf` maps to llama.cpp's, or llama.cpp's own.
        sources: The tensors of the public layout that it is made from.
        order: Those tensors → all their numbers, or some of them, in the order and shape that the architecture stores.
        change: How each number changes.
    """

    name: str
    sources: tuple[str, ...]
    order: Callable[..., Tensor]
    change: Change = SAME

    def made(self, *sources: Tensor) -> Tensor:
        """Return the tensor for its sources in fp32."""
        return self.change.do(self.order(*sources))


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: Its name there.
        keys: Keys of config.json → metadata with the same value.
        metadata: The contents of config.json → the rest of its metadata. A UserError if its graph computes something
            else.
        tensors: The contents of config.json, and a tensor's name in the public layout → the tensors of the file that
            are written in its place.
        config: Metadata, and the names of a file's tensors → keys of config.json that are not in `keys`.
    """

    name: str
    keys: Mapping[str, str]
    metadata: Callable[[Config], dict[str, Value]]
    tensors: Callable[[Config, str], list[Stored]]
    config: Callable[[Metadata, Collection[str]], dict[str, Any]] = field(default=lambda metadata, names: {})

    def all_metadata(self, config: Config) -> dict[str, Value]:
        """Return the metadata for the contents of config.json. A UserError if its graph computes something else."""
        floats = {key for key in self.keys if key.endswith(("_eps", "_epsilon", "_theta"))}
        shared = {name: float(config[key]) if key in floats else config[key] for key, name in self.keys.items()}
        try:
            return {**shared, **self.metadata(config)}
        except _Unfit as reason:
            raise UserError(f"to: llama.cpp's {self.name} cannot hold this model: {reason}.") from None


class _Unfit(Exception):
    """A reason why an architecture cannot hold a model."""


def _one_by_one(
    order: Callable[[Config, str, Tensor], Tensor] = lambda config, name, tensor: tensor,
    change: Callable[[str], Change] = lambda name: SAME,
) -> Callable[[Config, str], list[Stored]]:
    """Return the `tensors` of an architecture in which each public tensor has one counterpart."""
    return lambda config, name: [Stored(name, (name,), partial(order, config, name), change(name))]


def _rates(name: str) -> Change:
    return RATES if name.endswith(".A_log") else SAME


_SIZES = {"hidden_size": "embedding_length", "num_hidden_layers": "block_count"}
_EPS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_HEADS = {"intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count"}
_GROUPS = {"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
_TRANSFORMER = {**_SIZES, **_EPS, **_HEADS, **_GROUPS, "rope_theta": "rope.freq_base"}


def _transformer(config: Config) -> dict[str, Value]:
    """The further metadata of attention and SwiGLU, with rotary positions over whole heads."""
    scaling = _rotary_scaling(config["rope_parameters"])
    return {"attention.value_length": config["head_dim"], "rope.dimension_count": config["head_dim"], **scaling}


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
        "rope.scaling.attn_factor": rotary["attention_factor"] / _amplitude(factor),
    }


def _amplitude(factor: float) -> float:
    """Return the amplitude of YaRN that follows from its factor, by which llama.cpp multiplies `attn_factor`."""
    return 1 + 0.1 * math.log(max(factor, 1.0))


def _with_scaling(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    """The keys of config.json for scaled positions, except those of Llama 3."""
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor", 1.0)
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.get("rope.scaling.original_context_length")
        scaling["attention_factor"] = metadata.get("rope.scaling.attn_factor", 1.0) * _amplitude(factor)
    return {"rope_scaling": scaling}


def _no_llama3(config: Config) -> None:
    if config["rope_parameters"]["rope_type"] == "llama3":
        raise _Unfit("it has no positions scaled as in Llama 3.1")


_STATES = {"conv_kernel": "ssm.conv_kernel", "state_size": "ssm.state_size"}
_RECURRENT = {**_SIZES, **_STATES, "layer_norm_epsilon": "attention.layer_norm_rms_epsilon"}
_MAMBA = {**_RECURRENT, "time_step_rank": "ssm.time_step_rank"}
_MAMBA2 = {**_RECURRENT, "num_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count"}


def _recurrent(config: Config) -> dict[str, Value]:
    """The further metadata of Mamba and Mamba2."""
    if not config["use_conv_bias"]:
        raise _Unfit("its convolution has a bias, which this model lacks")
    width = config["expand"] * config["hidden_size"]
    return {"feed_forward_length": 0, "attention.head_count": 0, "ssm.inner_size": width}


def _mistral(config: Config) -> dict[str, Value]:
    if (window := config["sliding_window"]) is not None:
        raise _Unfit(f"its attention has no sliding window, and here one has {window} tokens")
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


def llama3_of(divisors: Tensor, base: float) -> dict[str, Any]:
    """Return the scaling of Llama 3 with bounds of 1 and 4 turns for divisors of the frequencies [head_dim/2].

    A UserError if there is none.
    """
    factor, size = float(divisors.max()), 2 * len(divisors)
    frequencies = Rotary(1, size, base=base).frequencies(torch.arange(len(divisors), dtype=torch.float32))
    share = (1 / divisors - 1 / factor) / (1 - 1 / max(factor, 1 + _NEAR))
    between = ((share > _NEAR) & (share < 1 - _NEAR)).nonzero().flatten().tolist()
    # the original length follows from a channel that turns 1 + 3 · share times in it
    lengths = [float(2 * math.pi * (1 + 3 * share[i]) / frequencies[i]) for i in between] or [8192.0]
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = round(lengths[len(lengths) // 2])
    expected = _llama3_divisors({**ROTARY_KEYS, "head_dim": size, "rope_theta": base, "rope_scaling": scaling})
    if not torch.allclose(divisors, expected, rtol=_NEAR):
        raise UserError("the divisors of its frequencies are not those of Llama 3")
    return scaling


def _qwen2(config: Config) -> dict[str, Value]:
    _no_llama3(config)
    if config["use_sliding_window"]:
        raise _Unfit(f"its attention has no sliding window, and here one has {config['sliding_window']} tokens")
    width, model = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    if width != model:
        raise _Unfit(f"its heads together are as wide as the model, and here {width} and {model} channels")
    return _transformer(config)


def _mamba(config: Config) -> dict[str, Value]:
    if config["expand"] != 2:
        raise _Unfit(f"its layers are twice as wide as the model, and expand is {config['expand']}")
    return _recurrent(config)


def _of_mamba(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    return {"expand": metadata["ssm.inner_size"] // metadata["embedding_length"]}


def _of_mamba2(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    return {**_of_mamba(metadata, names), "head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"]}


def _mamba_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    return tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def _mamba2_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    if name.endswith((".A_log", ".D")):
        return tensor[:, None]
    if name.endswith("mixer.norm.weight"):
        return tensor.unflatten(0, (config["n_groups"], -1))
    return _mamba_tensor(config, name, tensor)


_LINEAR = {"linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size"}
_LINEAR_HEADS = {"linear_num_value_heads": "ssm.time_step_rank", "linear_num_key_heads": "ssm.group_count"}
_QWEN35 = {**_TRANSFORMER, **_LINEAR, **_LINEAR_HEADS}


def _qwen35(config: Config) -> dict[str, Value]:
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    if all(recurrent):  # it aborts while it allocates an empty cache
        raise _Unfit("it needs a layer of attention, and all are linear")
    _no_llama3(config)
    if config["attention_bias"]:
        raise _Unfit("its attention has no biases")
    sizes = {size: config[f"linear_{size}_head_dim"] for size in ("key", "value")}
    if any(recurrent) and sizes["key"] != sizes["value"]:
        raise _Unfit(f"its keys and values have one size, and here {sizes['key']} and {sizes['value']}")
    if any(recurrent) and config["rms_norm_eps"] != _L2_EPS:
        raise _Unfit(
            f"it norms keys with the eps of all norms, which is {config['rms_norm_eps']:g} here instead of {_L2_EPS:g}",
        )
    return {
        **_transformer(config),
        "rope.dimension_count": round(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],  # of images; text has the same position in each
        "attention.recurrent_layers": recurrent,
        "ssm.inner_size": config["linear_num_value_heads"] * sizes["value"],
    }


def _of_qwen35(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    every, layers = metadata.get("full_attention_interval", 4), range(1, metadata["block_count"] + 1)
    recurrent = metadata.get("attention.recurrent_layers") or [bool(layer % every) for layer in layers]
    return {
        "layer_types": [_LAYER_TYPES[not linear] for linear in recurrent],
        "linear_value_head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "partial_rotary_factor": metadata["rope.dimension_count"] / metadata["attention.key_length"],
        **_with_scaling(metadata, names),
    }


def _qwen35_change(name: str) -> Change:
    centred = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return PLUS_ONE if centred else _rates(name)


def _qwen35_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    if "linear_attn." not in name:
        return tensor
    tensor = tensor.squeeze(1) if "conv1d" in name else tensor
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
        raise _Unfit("it norms embeddings, and this model does not; train with model.embedding_norm")
    if head % _RWKV7_HEAD or not math.isclose(eps * head, _RWKV7_EPS):
        raise _Unfit(
            f"its heads have a multiple of {_RWKV7_HEAD} channels and norms with an eps of {_RWKV7_EPS:g}, and here "
            f"they have {head} channels and {eps * head:g}",
        )
    return {"attention.head_count": 0, "token_shift_count": 2}


_RWKV7_HEAD = 64  # channels of a head that its vectors of 512 bits divide, counted fourfold
_RWKV7_EPS = 64e-5  # of the norm of each head
_RWKV7_RANKS = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}
_RWKV7 = {
    **{"intermediate_size": "feed_forward_length", "norm_eps": "attention.layer_norm_epsilon"},
    **{f"{ours}_low_rank_dim": f"attention.{theirs}_lora_rank" for ours, theirs in _RWKV7_RANKS.items()},
    **{**_SIZES, "head_dim": "wkv.head_size"},
}
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
        raise _Unfit("it needs linear layers and attention layers, and here all are of one kind")
    if config["rms_norm_eps"] != _L2_EPS:
        raise _Unfit(
            f"it norms keys and latents with the eps of all norms, which is {config['rms_norm_eps']:g} here instead of "
            f"{_L2_EPS:g}",
        )
    heads = config["num_attention_heads"]
    if config["linear_num_heads"] != heads:
        raise _Unfit(f"all layers have one number of heads, and here {config['linear_num_heads']} and {heads}")
    rank, shared, count = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_hidden_layers"]
    return {
        # it attends to latents, which all heads share; 0 makes a layer linear
        "attention.head_count_kv": [int(layer) for layer in full],
        "attention.key_length": rank + shared,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        # all layers are dense, but llama.cpp asks for the sizes of experts
        "leading_dense_block_count": count,
        "expert_feed_forward_length": 0,
        "expert_shared_count": 0,
        "expert_gating_func": 2,
    }


_KIMI = {
    **{"kv_lora_rank": "attention.kv_lora_rank", "v_head_dim": "attention.value_length_mla"},
    "qk_rope_head_dim": "rope.dimension_count",  # only their number: they do not turn
    **{"linear_conv_kernel_dim": "ssm.conv_kernel", "linear_head_dim": "kda.head_dim"},
}


def _of_kimi(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    dense, count = metadata.get("leading_dense_block_count", 0), metadata["block_count"]
    return {
        "linear_num_heads": metadata["attention.head_count"],
        "qk_nope_head_dim": metadata["attention.key_length_mla"] - metadata["rope.dimension_count"],
        "layer_types": [_LAYER_TYPES[heads > 0] for heads in metadata["attention.head_count_kv"]],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(count)],
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
    return [Stored(name, (name,), lambda tensor: tensor.unsqueeze(0) if convolution else tensor, _rates(name))]


def _of_llama(metadata: Metadata, names: Collection[str]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_output.bias" in names, **_with_scaling(metadata, names)}


# the name of a family → the architecture that computes the same
ARCHITECTURES: Mapping[str, Architecture] = {
    "fla_rwkv7": Architecture("rwkv7", _RWKV7, _rwkv7, _rwkv7_tensors),
    "hf_llama": Architecture("llama", _TRANSFORMER, _transformer, _llama_tensors, _of_llama),
    "hf_mistral": Architecture("llama", _TRANSFORMER, _mistral, _llama_tensors, _of_llama),
    "hf_qwen2": Architecture("qwen2", _TRANSFORMER, _qwen2, _one_by_one(), _with_scaling),
    "hf_mamba": Architecture("mamba", _MAMBA, _mamba, _one_by_one(_mamba_tensor, _rates), _of_mamba),
    "hf_mamba2": Architecture("mamba2", _MAMBA2, _recurrent, _one_by_one(_mamba2_tensor, _rates), _of_mamba2),
    "hf_qwen3_5": Architecture("qwen35", _QWEN35, _qwen35, _one_by_one(_qwen35_tensor, _qwen35_change), _of_qwen35),
    "hf_kimi_linear": Architecture("kimi-linear", _SIZES | _EPS | _HEADS | _KIMI, _kimi, _kimi_tensors, _of_kimi),
}
