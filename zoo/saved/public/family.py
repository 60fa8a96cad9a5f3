"""A family of public checkpoints: its config in our terms and back, and its table of tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kernels import UserError
from zoo.checkpoints.tensor_files import Weights
from zoo.lm.mlp import SwiGLU
from zoo.lm.model import LanguageModel
from zoo.saved.public.tensors import Rule

Target = Literal["fla", "huggingface", "transformers"]
Config = Mapping[str, Any]
Spec = dict[str, Any]  # a component in a config: class_path and init_args

GGUF = "gguf"  # llama.cpp's files, whose architectures hold some of the families
TIED = "tie_word_embeddings"
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
min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
use_bfloat16 use_cache
""")


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, declared in one of the files of `families`.

    Of a config.json every key that changes the mathematics is in `keys` or in `fixed`; one that is in neither, nor
    harmless, is refused unless it is null.

    Attributes:
        name: Its name in messages, such as `fla_gla`.
        target: The project that defines its layout.
        model_types: The `model_type`s it reads; the first is written. Empty for a project that has none.
        architecture: The class that `architectures` names in what is written.
        mixers: Our mixers that its layers may be, by class name.
        keys: Keys that `to_ours` reads → their values where config.json leaves them out.
        fixed: Keys with one meaning only → the values that have it; the first is the default, and is written.
        harmless: Keys that change nothing that a trained model computes.
        to_ours: Their keys → our `model` config.
        to_theirs: Our model (on the meta device) → their keys. No check of what they cannot hold is needed: the
            result is read back, and a model that differs is refused.
        tensors: Rules for the whole model.
        layer_tensors: Rules for each layer, with `{layer}` in the names. Where layers of several kinds have different
            names, all are listed: a rule counts where our model has its tensors.
        ignored: Patterns of public names that are not weights, or not used: rotary tables, heads for speculation.
        also: A further test of a config.json whose model_type another family has as well.
        preferred: Whether to try it for our model before other families that have its mixers.
        part: The key under which a config.json of a larger model holds that of its language model. What both have is
            taken from there, except whether embeddings are tied.
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
    ignored: tuple[str, ...] = ()
    also: Callable[[Config], bool] = field(default=lambda config: True)
    preferred: Callable[[LanguageModel], bool] = field(default=lambda model: False)
    part: str | None = None

    def read(self, config: Config) -> dict[str, Any]:
        """Our `model` config for the contents of a config.json; a UserError names a key without a meaning here."""
        if self.part is not None and self.part in config:
            outer = {key: config[key] for key in self.keys if key in config}
            # the larger model is who ties, or does not, whatever its language model would do alone
            config = outer | config[self.part] | {key: outer[key] for key in (TIED,) if key in outer}
        for key, value in config.items():
            allowed = self.fixed.get(key)
            if allowed is not None and value not in allowed:
                raise refusal(key, value, " or ".join(map(_shown, allowed)))
            if value is not None and not (allowed or key in self.keys or key in self.harmless | _GENERIC):
                raise UserError(
                    f"config.json: {key} is {_shown(value)}, which {self.name} does not know; only null is."
                )
            if value is None and key in _NEVER_NULL and self.keys.get(key) is not None:
                raise refusal(key, None, "1 or more")
            check_kind(key, value, self.keys.get(key))
        return self.to_ours({**self.keys, **{key: config[key] for key in self.keys if key in config}})

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
    return UserError(f"config.json: {key} is {_shown(value)}; our mixers can do {allowed}.")


def experts(layer: int, key: str, value: object) -> UserError:
    """The error to raise for a layer that a key makes a mixture of experts."""
    return UserError(
        f"config.json: {key} is {_shown(value)}, so layer {layer} is a mixture of experts; ours are dense."
    )


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


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)[:80]
