"""A family of public checkpoints: its config in our terms and back, and its table of tensors."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kernels import UserError
from mixers import did_you_mean
from zoo.checkpoints.tensor_files import Weights
from zoo.lm.mlp import SwiGLU
from zoo.lm.model import LanguageModel
from zoo.saved.public.tensors import Rule

Target = Literal["fla", "huggingface", "transformers"]
Config = Mapping[str, Any]
Spec = dict[str, Any]  # a component in a config: class_path and init_args

GGUF = "gguf"  # llama.cpp's files, whose architectures hold some of the families
TIED, _QUANTIZED = "tie_word_embeddings", "quantization_config"
_LARGEST = 10_000_000  # of a size, so that a few digits cannot ask for all memory
# no shape of a tensor would contradict our default in place of null
_NEVER_NULL = ("num_attention_heads", "num_heads")


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# keys that any config.json of transformers may hold; none changes what a model computes for given tokens
_GENERIC = words("""
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures auto_map
bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range
is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty max_length max_position_embeddings
min_length model_type name no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values
repetition_penalty return_dict return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss
tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript typical_p use_bfloat16 use_cache
""")
# ids and texts of tokens, versions, notes of other programs, and dropout, which only training has
_DESCRIPTIVE = re.compile(
    r"^_|_token_ids?$|^(bos|eos|pad|unk|sep|cls|mask)_token$|_version$|^unsloth|^is_\w+_config$|\.js_config$|dropout|_pdrop$"
)


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, declared in one of the files of `families`.

    Of a config.json every key that changes the mathematics is in `keys` or in `fixed`. A key that is in neither, nor
    harmless, is refused unless its value turns it off: null, false, 0, or empty.

    Attributes:
        name: Its name in messages, such as `fla_gla`.
        target: The project that defines its layout.
        model_types: The `model_type`s it reads; the first is written. Empty for a project that has none.
        architecture: The class that `architectures` names in what is written.
        mixers: Our mixers that its layers may be, by class name.
        keys: Keys that `to_ours` reads → their values where config.json leaves them out.
        fixed: Keys with one meaning only → the values that have it; the first is the default, and is written.
        harmless: Keys that change nothing that a trained model computes.
        same: Keys that may only repeat the value of another key → that key.
        idle: Keys without effect while another key is off → that key.
        to_ours: Their keys → our `model` config.
        to_theirs: Our model (on the meta device) → their keys. No check of what they cannot hold is needed: the
            result is read back, and a model that differs is refused.
        tensors: Rules for the whole model.
        layer_tensors: Rules for each layer, with `{layer}` in the names. Where layers of several kinds have different
            names, all are listed: a rule counts where our model has its tensors.
        ignored: Patterns of public names that are not weights, or not used: rotary tables, heads for speculation.
        also: A further test of a config.json whose model_type another family has as well.
        part: The key under which a config.json of a larger model holds that of its language model. What both have is
            taken from there, except whether embeddings are tied.
        inside: The key that holds further keys of the layers, which are named `inside.key` here.
    """

    name: str
    target: Target
    model_types: tuple[str, ...]
    architecture: str
    mixers: frozenset[str]
    keys: Config
    fixed: Mapping[str, tuple[Any, ...]]
    to_ours: Callable[[Config], dict[str, Any]]
    to_theirs: Callable[[LanguageModel], dict[str, Any]]
    tensors: tuple[Rule, ...]
    layer_tensors: tuple[Rule, ...]
    harmless: frozenset[str] = frozenset()
    same: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    also: Callable[[Config], bool] = field(default=lambda config: True)
    part: str | None = None
    inside: str | None = None

    def read(self, config: Config, ignore: Collection[str] = ()) -> dict[str, Any]:
        """Return our `model` config for the contents of a config.json, without the keys in `ignore`.

        A UserError names a key or value without a meaning here, or a key that cannot be ignored.
        """
        config = self.of_text(config)
        self._check_ignored(config, ignore)
        full = {**{key: allowed[0] for key, allowed in self.fixed.items()}, **self.keys, **config}
        for key, value in config.items():
            if (allowed := self.fixed.get(key)) is not None and not _is_one_of(value, allowed):
                raise refusal(key, value, " or ".join(map(shown, allowed)))
            if (other := self.same.get(key)) is not None and value not in (None, full.get(other)):
                raise refusal(key, value, f"the value of {other}, {shown(full.get(other))}")
            if (other := self.idle.get(key)) is not None and not (is_off(value) or is_off(full.get(other))):
                raise refusal(key, value, f"it only while {other} is off")
            if value is None and key in _NEVER_NULL and self.keys.get(key) is not None:
                raise refusal(key, None, "1 or more")
            check_kind(key, value, self.keys.get(key))
        if unknown := [key for key in config if key not in ignore and self.role(key, config[key]) is None]:
            raise UserError(
                f"config.json: {unknown[0]} is {shown(config[unknown[0]])}, which {self.name} does not know; only "
                f"null, false, 0 and empty values are (convert --ignore={','.join(unknown)} leaves it out, at the risk "
                "of other results)."
            )
        flags = {key: False for key, default in self.keys.items() if isinstance(default, bool) and full[key] is None}
        return self.to_ours({key: full[key] for key in self.keys} | flags)

    def of_text(self, config: Config) -> Config:
        """Return the keys that say what the language model is: those of a part, and those inside others by a path."""
        if self.inside is not None and isinstance(inner := config.get(self.inside), Mapping):
            others = {key: value for key, value in config.items() if key != self.inside}
            return others | {f"{self.inside}.{key}": value for key, value in inner.items()}
        if self.part is None or not isinstance(inner := config.get(self.part), Mapping):
            return config
        outer = {key: config[key] for key in (*self.keys, _QUANTIZED) if key in config}
        # the larger model is who ties, or does not, whatever its language model would do alone
        return {**outer, **inner} | {key: outer[key] for key in (TIED,) if key in outer}

    def role(self, key: str, value: object) -> str | None:
        """Return what a key of `of_text` does here; None for an unknown key with a value that is not off."""
        if key in self.keys:
            return "read"
        if key in self.fixed or key in self.same or key in self.idle:
            return "checked"
        if key in self.harmless | _GENERIC or _DESCRIPTIVE.search(key):
            return "without effect"
        return "off" if is_off(value) else None

    def _check_ignored(self, config: Config, ignore: Collection[str]) -> None:
        for key in ignore:
            if key == _QUANTIZED:
                raise UserError(
                    f"ignore: {key} says how the weights are stored; convert weights that are not quantised."
                )
            if key not in config:
                raise UserError(f"ignore: {key!r} is not a key of config.json{did_you_mean(key, list(config))}")
            if self.role(key, config[key]) in ("read", "checked"):
                raise UserError(f"ignore: {key} changes what {self.name} computes; only unknown keys can be ignored.")

    def write(self, model: LanguageModel) -> dict[str, Any]:
        """The contents of a config.json for our model, which `read` takes back."""
        fixed = {key: allowed[0] for key, allowed in self.fixed.items()}
        head = {"architectures": [self.architecture], "model_type": self.model_types[0]}
        return {**head, **self.keys, **fixed, **self.to_theirs(model)}


class Exported(NamedTuple):
    """Our model in a public layout.

    Attributes:
        layout: The name of the layout.
        target: The project that loads it.
        config: The contents of config.json.
        weights: The weights under their names.
        files: Further files of the folder: name → text.
    """

    layout: str
    target: Target
    config: dict[str, Any]
    weights: Weights
    files: Mapping[str, str] = {}


def component(name: str, **arguments: Any) -> Spec:
    """A component in a config."""
    return {"class_path": name, "init_args": arguments}


def pattern_of(kinds: Sequence[str], mixers: Mapping[str, tuple[str, Spec]]) -> Spec:
    """Our stack for the kind of each layer; `mixers` has a letter and the mixer of each kind."""
    letters = "".join(mixers[kind][0] for kind in kinds)
    if len(set(letters)) == 1:
        return component("Uniform", mixer=mixers[kinds[0]][1])
    period = next(n for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[: len(letters)] == letters)
    used = {letter: mixer for letter, mixer in sorted(mixers.values()) if letter in letters}
    return component("Pattern", pattern=letters[:period], mixers=used)


def model_of(config: Config, eps: float, stack: Spec, **others: Any) -> dict[str, Any]:
    """Our `model` config: a stack, and the sizes that all families call by the same keys."""
    return {
        "stack": stack,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "norm_eps": eps,
        "tie_embeddings": config[TIED],
        **others,
    }


def keys_of(model: LanguageModel, eps: str, *, without_tokens: bool = False) -> dict[str, Any]:
    """Their keys for what `model_of` reads; `eps` is the key of the norms'.

    With `without_tokens` ids of tokens are null. Where they are missing, transformers takes ids that may be outside of
    our vocabulary.
    """
    return {
        **(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) if without_tokens else {}),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        eps: model.norm.eps,
        TIED: model.lm_head is None,
    }


def mlp_size(model: LanguageModel) -> int | None:
    """The inner size of the model's MLPs; None without SwiGLU."""
    mlp = model.mlps[0] if model.mlps else None
    return mlp.down_proj.in_features if isinstance(mlp, SwiGLU) else None


def refusal(key: str, value: object, allowed: str) -> UserError:
    """The error to raise for a key whose value our mixers cannot follow; `allowed` says which they can."""
    return UserError(f"config.json: {key} is {shown(value)}; our mixers can do {allowed}.")


def experts(layer: int, key: str, value: object) -> UserError:
    """The error to raise for a layer that a key makes a mixture of experts."""
    return UserError(f"config.json: {key} is {shown(value)}, so layer {layer} is a mixture of experts; ours are dense.")


def is_off(value: object) -> bool:
    """Return whether a value turns a setting off: null, false, 0, "none", empty, or a mapping to nothing else."""
    if isinstance(value, Mapping):
        return all(map(is_off, value.values()))
    return not value or value == "none"


def unknown_in(settings: Config, allowed: Collection[str]) -> list[str]:
    """Return the keys of nested settings that are neither allowed nor off."""
    return [key for key, value in settings.items() if key not in allowed and not is_off(value)]


def _is_one_of(value: object, allowed: Sequence[object]) -> bool:
    """Return whether a value is allowed, where all values that turn a setting off are alike."""
    return value in allowed or (is_off(value) and allowed[0] == 0)


def check_kind(key: str, value: object, default: object) -> None:
    """Refuse a number, or yes or no, of another kind than its default; null is allowed."""
    if value is None or not isinstance(default, bool | int | float):
        return
    if isinstance(default, bool):
        valid, allowed = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        least = min(default, 1)
        valid, allowed = type(value) is int and value >= least, f"{least} or more"
        if valid and isinstance(value, int) and value > _LARGEST:
            valid, allowed = False, f"{_LARGEST:,} at most"
    else:
        valid, allowed = type(value) in (int, float), "numbers"
    if not valid:
        raise refusal(key, value, allowed)


def shown(value: object) -> str:
    """Return a value as JSON, the first 80 characters."""
    return json.dumps(value, default=repr)[:80]
