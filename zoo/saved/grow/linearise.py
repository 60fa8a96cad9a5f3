"""A trained model with a matrix state in place of some attention, as an exported folder; for the verb `linearise`."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Group
from torch import Tensor

import mixers
from kernels import UserError
from mixers import Expanded, LinearMixer, TokenMixer
from zoo.checkpoints.signature import sign
from zoo.checkpoints.tensor_files import Spec
from zoo.config import from_config, parse_model, to_dict
from zoo.config.signatures import settable
from zoo.data.text.corpus import Corpus
from zoo.data.text.split import held_out_tokens
from zoo.data.text.tokenizer import Tokenizer
from zoo.display import progress_bar
from zoo.files.safe_yaml import dump_yaml
from zoo.lm import LanguageModel
from zoo.saved.exported_folder import CONFIG, TOKENIZER, write_folder
from zoo.saved.grow.stack import Spec as MixerSpec
from zoo.saved.grow.stack import replaced
from zoo.saved.grow.weights import new_dtypes
from zoo.saved.model import SavedModel
from zoo.saved.public.tensors import ComputedWeights

LENGTH = 512  # of the windows in which the text is read
FOUND = re.compile(r"(every|auto):([0-9]+)|\[?([0-9, ]*)\]?")


class Linearised(NamedTuple):
    """A model in which a matrix state replaces some attention.

    Attributes:
        folder: Where it lies.
        layers: The layers that were replaced.
        kept: The layers that are still attention.
        mixer: Name of the mixer that replaced attention.
        carried: Parameters of the replaced layers that started from those of attention, as they are called in a layer.
        new: Those that were initialised.
        left: Parameters of attention that nothing starts from.
        loss: Of `teacher` and `untrained`, in nats per token; empty for a model without a tokenizer.
        alone: The loss with one layer replaced, by layer; for `keep=auto:n` only.
        text: The text of these losses.
    """

    folder: Path
    layers: list[int]
    kept: list[int]
    mixer: str
    carried: list[str]
    new: list[str]
    left: list[str]
    loss: dict[str, float]
    alone: dict[int, float]
    text: str

    def report(self) -> Group:
        """The layers, what was carried over, and the losses."""
        lines = {
            f"layers that are {self.mixer} now": ", ".join(map(str, self.layers)),
            "layers that are still attention": ", ".join(map(str, self.kept)) or "none",
            "carried over": ", ".join(self.carried),
            "new": ", ".join(self.new),
            "not carried over": ", ".join(self.left) or "nothing",
        }
        if self.alone:
            lines["loss with one layer replaced"] = ", ".join(f"{i}: {x:.3f}" for i, x in self.alone.items())
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in self.loss.items())
        lines["loss in nats per token"] = f"{losses} ({self.text})" if losses else self.text
        return Group(*(f"{name}: {value}" for name, value in lines.items()))


def replace_attention(
    saved: SavedModel,
    folder: Path,
    mixer: str | dict[str, Any],
    *,
    keep: str | list[int],
    text: str | None,
    tokens: int,
    seed: int,
    max_shard_size: int,
    files: Mapping[str, str] | None = None,
) -> Linearised:
    """Write a model with another mixer in place of some attention, and further `files`, name → text.

    The other arguments, and errors, are those of `zoo.linearise`.
    """
    before, weights = saved.on_meta()
    spec, attention, kept = _choices(before, mixer, keep)
    name = _class_of(spec).__name__
    samples, about = _samples(saved.tokenizer, text, tokens)
    if kept is None and samples is None:
        raise UserError(f"keep: {keep} needs the loss on a text, but {saved.path} was saved without a tokenizer")
    teacher, config = saved.load(), to_dict(saved.parsed)["model"]
    make = partial(_student, teacher, config, spec, seed=seed)
    alone: dict[int, float] = {}
    if kept is None:
        assert samples is not None
        student, *_ = make(attention)
        for layer in progress_bar(attention, desc="loss with one layer replaced"):
            with _swapped(teacher, student, [layer]):
                alone[layer] = _loss(teacher, samples)
        worst = sorted(alone, key=alone.__getitem__, reverse=True)
        kept = sorted(worst[: _number(keep, len(attention))])
    layers = [layer for layer in attention if layer not in kept]
    student, config, taken = make(layers)
    loss = {}
    if samples is not None:
        loss["teacher"] = _loss(teacher, samples)
        with _swapped(teacher, student, layers):
            loss["untrained"] = _loss(teacher, samples)
    meta = from_config(parse_model({"model": config}), "meta")
    made = {
        whole: tensor.to(dtypes[part])
        for layer in layers
        if (dtypes := new_dtypes(meta, layer, weights))
        for part, tensor in student.layers[layer].state_dict().items()
        if (whole := f"layers.{layer}.{part}") and part.startswith("mixer.")
    }
    specs = {
        each: Spec(tuple(made[each].shape), made[each].dtype) if each in made else weights.specs[each]
        for each in student.state_dict()
    }
    run_config = {**saved.config, "model": config}
    texts = {CONFIG: dump_yaml(run_config), **(files or {})}
    if saved.tokenizer is not None:
        texts[TOKENIZER] = saved.tokenizer.to_json()
    written = ComputedWeights(specs, lambda each: made[each] if each in made else weights.tensor(each))
    signature = sign(run_config) if saved.is_trusted else None
    write_folder(folder, texts, written, max_shard_size, hashed=True, signature=signature)
    own, old = student.mixers[layers[0]].state_dict(), before.mixers[layers[0]]
    used = {f"{weight.removesuffix('weight')}{end}" for weight in taken.values() for end in ("weight", "bias")}
    names = [*taken], [each for each in own if each not in taken], [e for e in old.state_dict() if e not in used]
    return Linearised(folder, layers, kept, name, *names, loss, alone, about)


def student_config(saved: SavedModel, mixer: str | dict[str, Any], keep: str | list[int]) -> dict[str, Any]:
    """Return the config of a student before anything is computed; `keep=auto:n` keeps the first n layers here.

    Errors are those of `zoo.linearise`.
    """
    before, _ = saved.on_meta()
    spec, attention, kept = _choices(before, mixer, keep)
    if kept is None:
        kept = attention[: _number(keep, len(attention))]
    layers = [layer for layer in attention if layer not in kept]
    return {**saved.config, "model": _replaced(before, to_dict(saved.parsed)["model"], spec, layers)}


def _choices(
    model: LanguageModel, mixer: str | dict[str, Any], keep: str | list[int]
) -> tuple[MixerSpec, list[int], list[int] | None]:
    """The config of the mixer, the layers of attention, and those that stay; None if that depends on losses."""
    spec = {"class_path": mixer} if isinstance(mixer, str) else mixer
    _class_of(spec)
    attention = _attention_layers(model.mixers)
    return spec, attention, _kept(keep, attention, model.num_layers)


def _class_of(spec: MixerSpec) -> type[LinearMixer]:
    """The mixer in a config; a UserError if it has no matrix state."""
    if not isinstance(path := spec.get("class_path"), str):
        raise UserError(f"mixer: {spec} has no class_path, the name of a mixer")
    if (inner := _expanded(spec)) is not None:
        return _class_of(inner)
    cls = mixers.get(path.rpartition(".")[2] if path.startswith("mixers.") else path)
    if not issubclass(cls, LinearMixer):
        allowed = [name for name in mixers.names() if issubclass(mixers.get(name), LinearMixer)]
        raise UserError(f"mixer: {cls.__name__} has no matrix state; choose one of {', '.join(allowed)}")
    return cls


def _expanded(spec: MixerSpec) -> MixerSpec | None:
    """The config inside an Expanded; None if it is not one."""
    if str(spec["class_path"]).rpartition(".")[2] != Expanded.__name__:
        return None
    inner = spec.get("init_args", {}).get("mixer")
    return {"class_path": inner} if isinstance(inner, str) else inner or {}


def _attention_layers(layers: Sequence[TokenMixer]) -> list[int]:
    """The layers of attention; a UserError if there are none, or what they are made of is not known."""
    attention = [layer for layer, mixer in enumerate(layers) if hasattr(mixer, "attention")]
    if not attention:
        raise UserError(
            f"checkpoint: the model has no attention layers to replace; layer 0 is a {type(layers[0]).__name__}"
        )
    for layer in attention:
        if not layers[layer].head_maps():
            name = type(layers[layer]).__name__
            raise UserError(f"checkpoint: layer {layer} is a {name}, whose heads cannot be carried over")
    return attention


def _number(keep: str | list[int], attention: int) -> int:
    """The number in every:n or auto:n; a UserError if it leaves nothing to replace, or keeps nothing."""
    kind, _, number = str(keep).partition(":")
    if attention == 1:
        raise UserError(f"keep: {keep} is a choice among several layers of attention, and there is one; [] replaces it")
    if not (1 if kind == "auto" else 2) <= int(number) <= (attention - 1 if kind == "auto" else attention):
        raise UserError(
            f"keep: {keep} must be from auto:1 to auto:{attention - 1}, one less than the attention layers"
            if kind == "auto"
            else f"keep: {keep} must be from every:2 to every:{attention}, the attention layers; [] keeps none of them"
        )
    return int(number)


def _kept(keep: str | list[int], attention: list[int], num_layers: int) -> list[int] | None:
    """The layers that stay; None if that depends on losses."""
    if isinstance(keep, str):
        if not keep.strip() or (match := FOUND.fullmatch(keep.strip())) is None:
            raise UserError(f"keep: {keep!r} must be every:n, auto:n, or a list of layers such as [3,7]")
        if match[1]:
            number = _number(keep.strip(), len(attention))
            return attention[number - 1 :: number] if match[1] == "every" else None
        keep = [int(layer) for layer in re.findall("[0-9]+", match[3])]
    for layer in keep:
        if not 0 <= layer < num_layers:
            raise UserError(f"keep: layer {layer} does not exist; the model has the layers 0 to {num_layers - 1}")
        if layer not in attention:
            raise UserError(f"keep: layer {layer} is not attention; those layers are {', '.join(map(str, attention))}")
    if set(keep) == set(attention):
        raise UserError(f"keep: {keep} are all attention layers of the model, so nothing is replaced")
    return sorted(set(keep))


def _samples(tokenizer: Tokenizer | None, text: str | None, tokens: int) -> tuple[tuple[Tensor, Tensor] | None, str]:
    """Tokens and labels [rows,length] of a text, and a description; None without a tokenizer."""
    if tokenizer is None:
        return None, "not computed, as the model was saved without a tokenizer"
    corpus = Corpus(text, key="text")
    stream = (
        held_out_tokens(corpus, tokenizer) if text is None else (i for d in corpus.texts() for i in tokenizer.encode(d))
    )
    ids = torch.tensor(list(itertools.islice(stream, tokens + 1)))
    if len(ids) < 2:
        raise UserError(f"text: {text} has fewer than two tokens")
    length = min(LENGTH, len(ids) - 1)
    rows = (len(ids) - 1) // length
    x, y = (ids[start : start + rows * length].view(rows, length) for start in (0, 1))
    return (x, y), f"{rows * length:,} tokens of {'held-out text of ' if text is None else ''}{corpus}"


@torch.inference_mode()
def _loss(model: LanguageModel, samples: tuple[Tensor, Tensor]) -> float:
    """The mean loss of a model."""
    rows = zip(*(each.split(1) for each in samples), strict=True)
    return torch.cat([model.token_losses(x, y).losses for x, y in rows]).double().mean().item()


@contextmanager
def _swapped(model: LanguageModel, other: LanguageModel, layers: Sequence[int]) -> Iterator[None]:
    """Inside the ``with`` block, `model` has the mixers of `other` in some layers."""
    own = {layer: model.mixers[layer] for layer in layers}
    try:
        for layer in layers:
            model.layers[layer].mixer = other.mixers[layer]
        yield
    finally:
        for layer, mixer in own.items():
            model.layers[layer].mixer = mixer


def _student(
    teacher: LanguageModel, config: dict[str, Any], spec: MixerSpec, layers: Sequence[int], seed: int
) -> tuple[LanguageModel, dict[str, Any], dict[str, str]]:
    """The model with other mixers in some layers, its config, and what was carried over: parameter → from which one."""
    config = _replaced(teacher, config, spec, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = from_config(parsed := parse_model({"model": config})).eval()
    taken: dict[str, str] = {}
    for layer in layers:
        old, new = teacher.mixers[layer], student.mixers[layer]
        assert isinstance(new, LinearMixer)
        inherited = new.inherited(old)
        new.load_state_dict({**new.state_dict(), **inherited})
        maps = new.head_maps()
        taken = {each.weight: old.head_maps()[kind].weight for kind, each in maps.items()}
        taken |= {each.bias: old.head_maps()[kind].bias for kind, each in maps.items() if each.bias in inherited}
    return student, to_dict(parsed)["model"], taken


def _replaced(teacher: LanguageModel, config: dict[str, Any], spec: MixerSpec, layers: Sequence[int]) -> dict[str, Any]:
    """The config of the model with other mixers in some layers."""
    change: dict[int, Callable[[MixerSpec], MixerSpec]] = {
        layer: partial(_sized, spec, teacher.mixers[layer], teacher.hidden_size) for layer in layers
    }
    return {**config, "stack": replaced(config["stack"], teacher.num_layers, change)}


def _sized(spec: MixerSpec, old: TokenMixer, hidden_size: int, _: MixerSpec) -> MixerSpec:
    """The config of the new mixer, with heads as those of the old one unless it sets them."""
    if (inner := _expanded(spec)) is not None:
        return {**spec, "init_args": {**spec["init_args"], "mixer": _sized(inner, old, hidden_size, _)}}
    cls, queries = _class_of(spec), old.head_maps()["q"]
    sizes = cls.sized_like(queries.heads, queries.size, hidden_size)
    fitting = {name: size for name, size in sizes.items() if name in settable(cls)}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": {**fitting, **spec.get("init_args", {})}}
