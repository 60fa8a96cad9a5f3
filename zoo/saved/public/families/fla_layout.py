"""The layout of flash-linear-attention's models: a mixer in all layers but those of attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.lm.model import LanguageModel
from zoo.saved.public.families import fla_attention
from zoo.saved.public.families.llama import ATTENTION, MLP
from zoo.saved.public.family import TIED, Config, Family, Spec, keys_of, mlp_size, model_of, words
from zoo.saved.public.tensors import LAYER, OUR_LAYER, Rows, Rule, around_layers, table

HARMLESS = words("attn_mode fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp")
_SIZES = dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=24, hidden_ratio=4.0, intermediate_size=None)
_KEYS: Config = {**_SIZES, "norm_eps": 1e-6, TIED: False, "attn": None}
_TENSORS = around_layers("model.embeddings.weight", "model.norm.weight")
_AROUND_THE_MIXER = {"attn_norm.weight": "mixer_norm.weight", "mlp_norm.weight": "mlp_norm.weight", **MLP}
MIXER, OUR_MIXER = f"{LAYER}attn.", f"{OUR_LAYER}mixer."
# with SiLU of a gate, or with its sigmoid or without one
OUTPUT_NORM = {"o_norm.weight": "o_norm.weight o_norm.norm.weight"}


@dataclass(frozen=True)
class Mixer:
    """A mixer of flash-linear-attention.

    Attributes:
        name: The family's name without `fla_`.
        architecture: The name of the model's class without `ForCausalLM`.
        mixers: Names of our mixers, separated by spaces.
        keys: Keys of its config → defaults.
        to_ours: Their keys → our mixer.
        to_theirs: Our mixer → their keys that `_keys_of` does not know.
        tensors: Names in their mixer → in ours, several separated by spaces.
        model_type: None for `name`.
        fixed, harmless: As for `Family`.
        norms, shared: Rules for further tensors of each layer, and of the model.
        layer: Which of the layers without attention `to_theirs` reads.
    """

    name: str
    architecture: str
    mixers: str
    keys: Config
    to_ours: Callable[[Config], Spec]
    tensors: Mapping[str, str]
    to_theirs: Callable[[Any], dict[str, Any]] = field(default=lambda mixer: {})
    model_type: str | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: str = ""
    norms: tuple[Rows, ...] = ()
    shared: tuple[Rule, ...] = ()
    layer: int = 0


def family(theirs: Mixer) -> Family:
    """The models with a mixer in all layers but those of attention."""

    def to_ours(config: Config) -> dict[str, Any]:
        stack = fla_attention.stack_of(config, theirs.to_ours(config))
        return model_of(config, config["norm_eps"], stack, intermediate_size=_intermediate_size(config))

    def to_theirs(model: LanguageModel) -> dict[str, Any]:
        mixer = fla_attention.linear_mixers(model)[theirs.layer]
        around = {**keys_of(model, "norm_eps"), "intermediate_size": mlp_size(model)}
        of_mixer = {**_keys_of(mixer, model.hidden_size, theirs.keys), **theirs.to_theirs(mixer)}
        return {**around, "attn": fla_attention.keys_of(model), **of_mixer}

    of_mixer = table({**ATTENTION, **theirs.tensors}, MIXER, OUR_MIXER)
    return Family(
        name=f"fla_{theirs.name}",
        target="fla",
        model_types=(theirs.model_type or theirs.name,),
        architecture=f"{theirs.architecture}ForCausalLM",
        mixers=words(theirs.mixers) | fla_attention.MIXERS,
        keys={**_KEYS, **theirs.keys},
        fixed={"hidden_act": ("swish",), "attnres_block_size": (None,), **theirs.fixed},
        harmless=HARMLESS | words(theirs.harmless),
        same={"rms_norm_eps": "norm_eps"},
        idle={"share_conv_kernel": "use_short_conv"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        tensors=(*_TENSORS, *theirs.shared),
        layer_tensors=(*theirs.norms, *table(_AROUND_THE_MIXER), *of_mixer),
    )


def _intermediate_size(config: Config) -> int:
    """The inner size of the MLPs: as given, or about 2/3 · hidden_ratio · hidden_size."""
    if config["intermediate_size"] is not None:
        return config["intermediate_size"]
    ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
    return -(int(config["hidden_size"] * ratio * 2 / 3) // -256) * 256


def projections(streams: str) -> dict[str, str]:
    """The weights of the projections of these streams, and of the output's."""
    return {**{f"{x}_proj.weight": f"in_proj.{x}.weight" for x in streams}, "o_proj.weight": "o_proj.weight"}


def convolutions(**streams: str) -> dict[str, str]:
    """The weights and biases of convolutions, by stream: theirs=ours."""
    parts = ("weight", "bias")
    return {f"{t}_conv1d.{part}": f"{o}_features.{part}" for t, o in streams.items() for part in parts}


def taps_of(config: Config) -> int:
    return config["conv_size"] if config["use_short_conv"] else 0


def _keys_of(mixer: Any, hidden_size: int, keys: Config) -> dict[str, Any]:
    """Return those of `keys` that several mixers have, for ours in a model of this width."""
    heads, taps = mixer.num_heads, mixer.q_features.spec.conv
    gated, beta = getattr(getattr(mixer, "o_norm", None), "gated", False), getattr(mixer, "beta", None)
    expand_k, expand_v = (heads * size / hidden_size for size in (mixer.key_size, mixer.value_size))
    shared = {
        **{"num_heads": mixer.num_key_heads, "num_v_heads": heads},
        **{"head_dim": mixer.key_size, "expand_ratio": mixer.key_size, "expand_k": expand_k},
        # relative to the width of the model, as that of keys, or to the size of a key
        "expand_v": expand_v if "expand_k" in keys else mixer.value_size / mixer.key_size,
        **{"use_short_conv": taps > 0, "conv_size": taps or 4, "use_gate": gated, "use_output_gate": gated},
        "allow_neg_eigval": beta is not None and beta.most == 2,
    }
    return {key: value for key, value in shared.items() if key in keys}
