"""Mamba2 of flash-linear-attention, and Mamba and Mamba2 of transformers."""

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from kernels import UserError
from mixers import Mamba2
from zoo.lm.model import LanguageModel
from zoo.saved.public.families import fla_layout
from zoo.saved.public.family import TIED, Config, Family, Spec, Target, component, keys_of, model_of, refusal, words
from zoo.saved.public.tensors import Rows, around_layers, table

_TENSORS = around_layers("backbone.embeddings.weight", "backbone.norm_f.weight")
_FIXED = {"hidden_act": ("silu", "swish"), "use_bias": (False,)}
NO_LIMIT = ([0.0, inf], [0.0, {"__float__": "Infinity"}])
# how originals were made, and numerical choices; the layout of a public model ignores what an original config adds
_HARMLESS = words("""
chunk_size d_inner d_model fused_add_norm n_layer pad_vocab_size_multiple rescale_prenorm_residual residual_in_fp32
rms_norm ssm_cfg
""")
_TIME_STEPS = words("time_step_floor time_step_init_scheme time_step_max time_step_min time_step_rank time_step_scale")


def _layer_tensors(names: Mapping[str, str]) -> tuple[Rows, ...]:
    """The table of a layer: its norm, and the mixer's tensors (theirs → ours, in the order of their rows)."""
    around = table({"norm.weight": "mixer_norm.weight"}, "backbone.layers.{layer}.")
    return *around, *table(names, "backbone.layers.{layer}.mixer.", "layers.{layer}.mixer.")


def _model(config: Config, eps: float, mixer: Spec) -> dict[str, Any]:
    """Our `model` config, with one mixer in all layers and no MLPs."""
    return model_of(config, eps, component("Uniform", mixer=mixer), mlp=None)


def expansion(width: int, model: LanguageModel) -> int:
    """The inner width of a layer, in multiples of the width of the residual stream."""
    if width % model.hidden_size:
        raise UserError(f"to: an inner width of {width} is not a multiple of hidden_size {model.hidden_size}.")
    return width // model.hidden_size


def _mamba1(config: Config) -> dict[str, Any]:
    width, inner, rank = config["expand"] * config["hidden_size"], config["intermediate_size"], config["time_step_rank"]
    if inner not in (None, width):
        raise refusal("intermediate_size", inner, f"expand · hidden_size, {width}")
    mixer = component(
        "Mamba1",
        expand=config["expand"],
        state_dim=config["state_size"],
        conv=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        dt_rank=None if rank == "auto" else rank,
    )
    return _model(config, config["layer_norm_epsilon"], mixer)


def _mamba1_keys(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.mixers[0]
    return {
        **keys_of(model, "layer_norm_epsilon"),
        "state_size": mixer.state_dim,
        "expand": expansion(mixer.width, model),
        "intermediate_size": mixer.width,
        "conv_kernel": mixer.x_features.spec.conv,
        "use_conv_bias": mixer.x_features.spec.bias,
        "time_step_rank": mixer.dt_proj.in_features,
    }


class Mamba2Keys(NamedTuple):
    """The names of the keys of Mamba2, which differ between projects."""

    num_heads: str
    head_dim: str
    state_dim: str
    num_groups: str
    conv: str
    bias: str

    def mixer(self, config: Config, eps: float, **arguments: Any) -> Spec:
        """Our mixer for their keys; `arguments` say its width."""
        return component(
            "Mamba2",
            head_dim=config[self.head_dim],
            state_dim=config[self.state_dim],
            num_groups=config[self.num_groups],
            xbc={"conv": config[self.conv], "bias": config[self.bias], "activation": "silu"},
            norm_eps=eps,
            **arguments,
        )

    def keys(self, mixer: Mamba2) -> dict[str, Any]:
        """Their keys for our mixer."""
        features = mixer.v_features.spec
        sizes = (mixer.num_heads, mixer.value_size, mixer.key_size, mixer.num_key_heads, features.conv, features.bias)
        return dict(zip(self, sizes, strict=True))


_MAMBA2 = Mamba2Keys("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_conv_bias")
# theirs → ours, in the order of their rows
MAMBA2 = {
    "in_proj.weight": " ".join(f"in_proj.{part}.weight" for part in ("z", "x", "B", "C", "dt")),
    "conv1d.weight": "v_features.weight k_features.weight q_features.weight",
    "conv1d.bias": "v_features.bias k_features.bias q_features.bias",
    "A_log": "decay.A_log",
    "dt_bias": "decay.dt_bias",
    "D": "D",
    "norm.weight": "norm.weight",
    "out_proj.weight": "out_proj.weight",
}


def _mamba2_family(
    target: Target, eps: str, keys: Config, fixed: Mapping[str, tuple[Any, ...]], harmless: frozenset[str]
) -> Family:
    """Mamba2 in a project whose key for the eps of norms is `eps`, by which its configs are told from the others'."""

    def to_ours(config: Config) -> dict[str, Any]:
        width, heads = config["expand"] * config["hidden_size"], config["num_heads"]
        if heads is not None and heads * config["head_dim"] != width:
            raise refusal("num_heads", heads, f"expand · hidden_size / head_dim, {width / config['head_dim']:g}")
        return _model(config, config[eps], _MAMBA2.mixer(config, config[eps], expand=config["expand"]))

    def to_theirs(model: LanguageModel) -> dict[str, Any]:
        mixer: Any = model.mixers[0]
        return {
            **keys_of(model, eps),
            **_MAMBA2.keys(mixer),
            "expand": expansion(mixer.num_heads * mixer.value_size, model),
        }

    defaults = {"head_dim": 64, "state_size": 128, "expand": 2, "conv_kernel": 4, "use_conv_bias": True, TIED: False}
    return Family(
        name="fla_mamba2" if target == "fla" else "hf_mamba2",
        target=target,
        model_types=("mamba2",),
        also=lambda config: ("norm_eps" in config) == (target == "fla"),
        architecture="Mamba2ForCausalLM",
        mixers=words("Mamba2"),
        keys={**defaults, **keys},
        fixed={**_FIXED, **fixed},
        harmless=_HARMLESS | harmless,
        same={"time_step_limit": "dt_limit"} if target == "fla" else {},
        to_ours=to_ours,
        to_theirs=to_theirs,
        tensors=_TENSORS,
        layer_tensors=_layer_tensors(MAMBA2),
    )


FAMILIES = (
    _mamba2_family(
        "fla",
        "norm_eps",
        keys=dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=48, num_heads=None, n_groups=1, norm_eps=1e-5),
        fixed=dict(D_has_hdim=(False,), rmsnorm=(True,), norm_before_gate=(False,), dt_limit=NO_LIMIT),
        harmless=fla_layout.HARMLESS | _TIME_STEPS | words("conv_init A_init_range dt_min dt_max dt_init_floor"),
    ),
    Family(
        name="hf_mamba",
        target="huggingface",
        model_types=("mamba",),
        architecture="MambaForCausalLM",
        mixers=words("Mamba1"),
        keys=dict(
            vocab_size=50280, hidden_size=768, num_hidden_layers=32, intermediate_size=None, layer_norm_epsilon=1e-5
        )
        | dict(state_size=16, expand=2, conv_kernel=4, use_conv_bias=True, time_step_rank="auto")
        | {TIED: True},
        fixed=_FIXED,
        harmless=_HARMLESS | _TIME_STEPS | words("use_associative_scan use_mambapy"),
        to_ours=_mamba1,
        to_theirs=_mamba1_keys,
        tensors=_TENSORS,
        layer_tensors=_layer_tensors(
            {
                "in_proj.weight": "in_proj.x.weight in_proj.z.weight",
                "conv1d.weight": "x_features.weight",
                "conv1d.bias": "x_features.bias",
                "x_proj.weight": "x_proj.dt.weight x_proj.B.weight x_proj.C.weight",
                "dt_proj.weight": "dt_proj.weight",
                "dt_proj.bias": "dt_bias",
                "A_log": "A_log",
                "D": "D",
                "out_proj.weight": "out_proj.weight",
            }
        ),
    ),
    _mamba2_family(
        "huggingface",
        "layer_norm_epsilon",
        keys=dict(vocab_size=32768, hidden_size=4096, num_hidden_layers=64)
        | dict(num_heads=128, n_groups=8, layer_norm_epsilon=1e-5),
        fixed=dict(time_step_limit=NO_LIMIT),
        # transformers always norms after the gate, whatever norm_before_gate says
        harmless=_TIME_STEPS | words("intermediate_size norm_before_gate"),
    ),
)
