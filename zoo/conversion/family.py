"""A family of public checkpoints: its config in our terms and back, and its table of tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kernels import UserError
from zoo.conversion.generic import GENERIC
from zoo.conversion.rules import Rule
from zoo.lm.model import LanguageModel

Target = Literal["fla", "huggingface"]
Config = Mapping[str, Any]

TIED = "tie_word_embeddings"
_LARGEST = 10_000_000  # of a size, so that a few digits cannot ask for all memory


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, declared in one file of `families`.

    Of a config.json every key that changes the mathematics is in `keys` or in `fixed`; one that is in neither, nor in
    `harmless` or `GENERIC`, is refused unless it is null.

    Attributes:
        name: Its name in messages, such as `fla_gla`.
        target: Whose layout it is.
        model_types: The `model_type`s it reads; the first is written.
        architecture: The class that `architectures` names in what is written.
        mixers: Our mixers that its layers may be, by class name.
        keys: Keys that `to_ours` reads → their values where config.json leaves them out.
        fixed: Keys with one meaning only → the values that have it; the first is the default, and is written.
        harmless: Keys that change nothing that a trained model computes.
        to_ours: Their keys → our `model` config.
        to_theirs: Our model (on the meta device) → their keys. No check of what they cannot hold is needed: the
            result is read back, and a model that differs is refused.
        tensors: Of the whole model.
        layer_tensors: Of each layer, with `{layer}` in the names. Where layers of several kinds have different names,
            all are listed: a rule counts where our model has its tensors.
        ignored: Patterns of public names that are not weights, or not used: rotary tables, heads for speculation.
        also: A further test of a config.json whose model_type another family has as well.
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
    part: str | None = None

    def read(self, config: Config) -> dict[str, Any]:
        """Our `model` config for the contents of a config.json.

        Raises:
            UserError: It asks for something that our mixers cannot do; the key is named.
        """
        if self.part is not None and self.part in config:
            outer = {key: config[key] for key in self.keys if key in config}
            # the larger model is who ties, or does not, whatever its language model would do alone
            config = outer | config[self.part] | {key: outer[key] for key in (TIED,) if key in outer}
        for key, value in config.items():
            allowed = self.fixed.get(key)
            if allowed is not None and value not in allowed:
                raise refusal(key, value, " or ".join(map(_shown, allowed)))
            if value is not None and not (allowed or key in self.keys or key in self.harmless or key in GENERIC):
                raise UserError(
                    f"config.json: {key} is {_shown(value)}, which {self.name} does not know; only null is."
                )
            check_kind(key, value, self.keys.get(key))
        return self.to_ours({**self.keys, **{key: config[key] for key in self.keys if key in config}})

    def write(self, model: LanguageModel) -> dict[str, Any]:
        """The contents of a config.json for our model, which `read` takes back."""
        fixed = {key: allowed[0] for key, allowed in self.fixed.items()}
        head = {"architectures": [self.architecture], "model_type": self.model_types[0]}
        return {**head, **self.keys, **fixed, **self.to_theirs(model)}


def refusal(key: str, value: object, allowed: str) -> UserError:
    """The error to raise for a key whose value our mixers cannot follow; `allowed` says which they can."""
    return UserError(f"config.json: {key} is {_shown(value)}; our mixers can do {allowed}.")


def check_kind(key: str, value: object, default: object) -> None:
    """Refuse a number, or yes or no, of another kind than its default; null is allowed."""
    if value is None or not isinstance(default, bool | int | float):
        return
    if isinstance(default, bool):
        fits, allowed = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        least = min(default, 1)
        fits, allowed = type(value) is int and value >= least, f"{least} or more"
        if fits and isinstance(value, int) and value > _LARGEST:
            fits, allowed = False, f"{_LARGEST:,} at most"
    else:
        fits, allowed = type(value) in (int, float), "numbers"
    if not fits:
        raise refusal(key, value, allowed)


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)[:80]
