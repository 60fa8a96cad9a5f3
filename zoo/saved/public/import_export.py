"""Conversion of a public folder into a model of this project, and of a model into a public folder."""

import dataclasses
import json
import logging
import statistics
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from kernels import UserError
from mixers import RMSNorm, ZeroCentredRMSNorm, did_you_mean
from zoo.checkpoints.tensor_files import TensorsInMemory, Weights
from zoo.config.build import from_config
from zoo.config.parser import parse_model
from zoo.lm.model import LanguageModel
from zoo.saved.gguf.architectures import ARCHITECTURES
from zoo.saved.public.families import FAMILIES, READ_ONLY, REFUSED
from zoo.saved.public.family import GGUF, Exported, Family, Target, shown, words
from zoo.saved.public.folder import PublicFolder
from zoo.saved.public.mapping import TensorMap

log = logging.getLogger(__name__)

_TARGETS: tuple[Target, ...] = ("fla", "huggingface")
WRAPPED: Target = "transformers"
MODEL_TYPE, _WRAPPER = "zoo", "modeling_zoo"
_NEAR = 0.1  # distance of a mean from the start of the other convention
# attributes that only matter to a model that is not trained yet; a Features' map is a module, which is compared itself
_INITIAL = words("training initializer_range linear_initializer scale_output_projections low high site map")
_PLAIN = (bool, int, float, str, type(None))


class Imported(NamedTuple):
    """A public folder in our terms: the `model` config, and weights under our names."""

    model: dict[str, Any]
    weights: Weights


def imported(folder: PublicFolder, ignore: Collection[str] = ()) -> Imported:
    """Read a public folder, without the keys of its config.json in `ignore`.

    A UserError if no family knows it, our mixers cannot do what its config says, or weights are missing, damaged,
    left over or misshapen.
    """
    config, path = folder.config(), folder.path
    family = family_of(config, path)
    try:
        model = family.read(config, ignore)
    except UserError as error:
        reason = str(error).removeprefix("" if folder.config_file != path else "config.json: ")
        raise UserError(reason if reason.startswith("ignore: ") else f"checkpoint: {path}, {reason}") from None
    except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError) as error:  # a value of another type
        raise UserError(f"checkpoint: {folder.config_file} has a value that no {family.name} has: {error}.") from None
    theirs = folder.weights
    try:
        ours = on_meta(model)
    except UserError as error:
        raise UserError(f"checkpoint: {path}, {error}") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, RuntimeError) as error:
        raise UserError(f"checkpoint: {folder.config_file} describes no {family.name}: {error}.") from None
    weights = TensorMap(family, ours).as_ours(theirs, path)
    _warn_of_norms(ours, weights, path)
    return Imported(model, weights)


def described(config: dict[str, Any], ignore: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Return the keys of a config.json, in the terms of its family, with their values and what they do."""
    family = family_of(config, Path())
    return [
        (key, shown(value), "ignored" if key in ignore else family.role(key, value) or "unknown")
        for key, value in family.of_text(config).items()
    ]


def _warn_of_norms(model: LanguageModel, weights: Weights, path: Path) -> None:
    """Warn if the weights of most norms have the mean of the other convention: 1 where they are added to 1, or 0."""
    for kind, start, other in ((ZeroCentredRMSNorm, 0, 1), (RMSNorm, 1, 0)):
        names = [f"{name}.weight" for name, module in model.named_modules() if type(module) is kind]
        means = [float(weights.tensor(name).float().mean()) for name in names if name in weights.specs]
        if means and abs(statistics.median(means) - other) < _NEAR:
            log.warning(
                "%s: the weights of its norms have a mean of %.2g, but those of %s start at %d; check that its "
                "config.json belongs to its weights",
                path,
                statistics.median(means),
                kind.__name__,
                start,
            )


def family_of(config: dict[str, Any], folder: Path) -> Family:
    """The family that a config.json belongs to; a UserError if it belongs to none."""
    kind = config.get("model_type")
    for family in (*FAMILIES, *READ_ONLY):
        if kind in (family.model_types or (None,)) and family.also(config):
            return family
    if kind == MODEL_TYPE:
        raise UserError(
            f"checkpoint: {folder} was written by convert with to={WRAPPED}, which cannot be read back; "
            "use the run, checkpoint or exported folder that it was converted from."
        )
    if isinstance(kind, str) and kind in REFUSED:
        raise UserError(f"checkpoint: {folder} has the model_type {json.dumps(kind)}: {REFUSED[kind]}.")
    model_types = sorted({name for family in FAMILIES for name in family.model_types})
    hint = did_you_mean(kind, model_types) if isinstance(kind, str) else ""
    raise UserError(
        f"checkpoint: {folder} has the model_type {json.dumps(kind, default=repr)[:80]}, which no family of "
        f"this version has{hint} (known: {', '.join(model_types)})."
    )


def exported(model: LanguageModel, weights: Weights, to: str) -> Exported:
    """Write a model (on the meta device) in the terms of the first family of a target that can hold it.

    The target is `fla` or `huggingface`, or the name of a family where several can hold the model. With
    `transformers` the folder contains a wrapper that requires this project.
    """
    if to == WRAPPED:
        return _wrapped(model, weights)
    names = [*_TARGETS, WRAPPED, GGUF, *(family.name for family in FAMILIES)]
    if to not in names:
        raise UserError(f"to: {to!r} is not one of {', '.join(names)}{did_you_mean(to, names)}")
    return in_a_layout(model, weights, [family for family in FAMILIES if to in (family.target, family.name)], to)


def _wrapped(model: LanguageModel, weights: Weights) -> Exported:
    """Write any language model (on the meta device) for `modeling_zoo.py`, by the names of its parameters."""
    if model.head is not None or model.inputs is not None:
        raise UserError(f"to: {WRAPPED} takes language models, and this one has the inputs or the head of another.")
    model.load_state_dict({name: weights.tensor(name) for name in weights.specs}, assign=True)
    assert model.config is not None
    source = Path(__file__).with_name(f"{_WRAPPER}.py").read_text(encoding="utf-8")
    config = {
        "architectures": ["ZooForCausalLM"],
        "auto_map": {"AutoConfig": f"{_WRAPPER}.ZooConfig", "AutoModelForCausalLM": f"{_WRAPPER}.ZooForCausalLM"},
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "tie_word_embeddings": False,  # of which this project takes care
        "dtype": str(weights.specs["embeddings.weight"].dtype).removeprefix("torch."),
        "zoo": model.config["model"],
    }
    named = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    return Exported(MODEL_TYPE, WRAPPED, config, TensorsInMemory(named), {f"{_WRAPPER}.py": source})


def in_a_layout(model: LanguageModel, weights: Weights, named: Sequence[Family], to: str) -> Exported:
    """Write a model (on the meta device) in the terms of the first of these families that can hold it.

    `to` is the name of the families together, for messages.
    """
    kinds = {type(mixer).__name__ for mixer in model.mixers}
    families = [family for family in named if kinds <= family.mixers]
    if not families:
        layers = "layers of " + ", ".join(sorted(kinds)) + (" in one model" if len(kinds) > 1 else "")
        held = sorted({name for family in named for name in family.mixers})
        raise UserError(f"to: no family of {to} has {layers}; each has some of {', '.join(held)}.")
    refused: UserError | None = None
    for family in families:
        try:
            config, table = _layout(model, family)
        except UserError as error:
            refused = refused or error
            continue
        dtype = str(weights.specs["embeddings.weight"].dtype).removeprefix("torch.")
        return Exported(family.name, family.target, {**config, "dtype": dtype}, table.as_theirs(weights))
    assert refused is not None
    raise refused


def layouts(model: LanguageModel) -> list[str]:
    """Return the names of the layouts that `convert` can write a language model (on the meta device) to."""
    names, kinds = [], {type(mixer).__name__ for mixer in model.mixers}
    for family in FAMILIES:
        with suppress(UserError):
            if kinds <= family.mixers and _layout(model, family):
                names.append(family.name)
    return [*names, *([GGUF] if ARCHITECTURES.keys() & {*names} else []), WRAPPED]


def _layout(model: LanguageModel, family: Family) -> tuple[dict[str, Any], TensorMap]:
    """The config.json and the tensors of a model in a family's layout; a UserError if it reads as another model."""
    config = family.write(model)
    try:
        reread = on_meta(family.read(config))
    except UserError as error:
        raise UserError(f"to: {family.name} cannot hold this model: {error}") from None
    if (mismatch := difference(model, reread)) is not None:
        one_eps = " (it has one eps for all norms: train with model.norm_eps equal to the mixers')"
        advice = one_eps if ".eps is " in mismatch else ""
        raise UserError(f"to: {family.name} cannot hold this model: {mismatch}{advice}.")
    return config, TensorMap(family, reread)


def on_meta(model: dict[str, Any]) -> LanguageModel:
    """The model of a `model` config, without memory for its weights."""
    return from_config(parse_model({"model": model}), "meta")


def difference(ours: nn.Module, other: nn.Module) -> str | None:
    """The first difference in modules, settings or shapes, as `layers.0.mixer.o_norm.eps is 0.001 instead of 1e-06`.

    Differences that only matter for initialisation do not count.
    """
    theirs = dict(other.named_modules(remove_duplicate=False))
    for name, module in ours.named_modules(remove_duplicate=False):
        where, counterpart = f"{name}: " if name else "", theirs.pop(name, None)
        if counterpart is None or type(counterpart) is not type(module):
            instead = "nothing" if counterpart is None else type(counterpart).__name__
            return f"{where}{type(module).__name__} instead of {instead}"
        settings, expected = _settings(module), _settings(counterpart)
        for key in [*settings, *expected]:
            if settings.get(key) != expected.get(key):
                return f"{f'{name}.{key}'.lstrip('.')} is {settings.get(key)} instead of {expected.get(key)}"
    for name, module in theirs.items():
        return f"it always has {name} ({type(module).__name__}), which is missing here"
    return None


def _settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, and the shapes of its parameters."""
    shapes = {name: list(tensor.shape) for name, tensor in module.named_parameters(recurse=False)}
    return {**_plain(vars(module)), **shapes}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith("_") or key in _INITIAL:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            plain |= {f"{key}.{name}": part for name, part in _plain(fields).items()}
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            plain[key] = value
    return plain
