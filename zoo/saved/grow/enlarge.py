"""The verb `statex`: a trained model in, an exported folder with a larger model out."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Column, Table

from kernels import UserError
from mixers import Expanded, Growth, TokenMixer, did_you_mean, growths
from mixers.growth import INITS, Init
from zoo.arguments import check_seed
from zoo.checkpoints.signature import sign
from zoo.checkpoints.tensor_files import SHARD_BYTES
from zoo.config import from_config, parse_model, to_dict
from zoo.files.output import check_output, check_shard_size
from zoo.files.safe_yaml import dump_yaml
from zoo.lm import LanguageModel
from zoo.saved.exported_folder import CONFIG, TOKENIZER, write_folder
from zoo.saved.grow.stack import Spec, replaced
from zoo.saved.grow.weights import grown_weights
from zoo.saved.model import SavedModel


class Size(NamedTuple):
    """Numbers of a model: its parameters, and the elements of those states that do not grow with the length."""

    parameters: int
    state: int


class Grown(NamedTuple):
    """A larger model: its folder, how each layer grew ("GLA: merge, num_heads=1"), and its size before and now."""

    folder: Path
    layers: dict[int, str]
    before: Size
    after: Size

    def report(self) -> Group:
        """Parameters and state before and after, and the layers."""
        table = Table("model", Column("parameters", justify="right"), Column("state", justify="right"))
        for name, size in {"before": self.before, "after": self.after}.items():
            table.add_row(name, *(f"{number:,}" for number in size))
        if self.before.state:
            table.add_row("ratio", *(f"{now / then:.3f}" for then, now in zip(self.before, self.after, strict=True)))
        alike: dict[str, list[str]] = {}
        for layer, how in self.layers.items():
            alike.setdefault(how, []).append(str(layer))
        return Group(table, *(f"layers {', '.join(layers)}: {how}" for how, layers in alike.items()))


def statex(
    checkpoint: str | Path,
    output: str | Path,
    layers: int | list[int] = 4,
    init: Init = "reinit",
    way: str | None = None,
    factor: int | None = None,
    seed: int = 0,
    max_shard_size: int = SHARD_BYTES,
    trust: bool = False,
    overwrite: bool = False,
) -> Grown:
    """Make the state of a trained model larger in some layers, to train it on (StateX).

    Weights keep their dtype and are copied a shard at a time; only the layers that grow are in memory as a whole.

    Args:
        checkpoint: A run's folder, a .ckpt file, an exported or a public folder, or hf://owner/name on the Hub.
        output: The folder to write; `load`, `evaluate` and `optim.initial_weights` take it.
        layers: How many layers grow, uniformly from the first; or a list of them, from 0.
        init: What happens to the weights of these layers: `reinit` draws those that mix tokens anew, `inherit` keeps
            them, `preserve` keeps what the model computes, where mathematics allows it.
        way: How they grow: `merge` heads into one, `widen` the keys, or `expand` each head into subheads; null for the
            mixer's own, and `expand` for mixers without one.
        factor: How many times larger their state becomes; null merges all heads, and is 4 otherwise.
        seed: Seed of new weights.
        max_shard_size: Bytes of a file with weights, at most; larger models are divided.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        overwrite: Whether to replace a model that was exported there; other files in the folder stay.

    Returns:
        The folder, the layers, and the sizes before and after.

    Raises:
        UserError: The model does not exist or is damaged, a layer cannot grow as asked, or the folder holds
            something else.
    """
    if init not in INITS:
        raise UserError(f"init: {init!r} is not one of {', '.join(INITS)}{did_you_mean(init, list(INITS))}")
    check_seed(seed)
    folder = Path(output)
    check_output(folder, "an exported model", overwrite, checkpoint)
    check_shard_size(max_shard_size)
    saved = SavedModel.open(checkpoint, trust)
    before, weights = saved.on_meta()
    growing = chosen_layers(before.mixers, layers, way)
    config, how = grown_config(to_dict(saved.parsed)["model"], before, growing, init, factor)
    after = from_config(parse_model({"model": config}), "meta")
    sizes = _size(before), _size(after)
    grown = grown_weights(after, before, weights, growing, init, seed)
    run_config = {**saved.config, "model": config}
    signature = sign(run_config) if saved.is_trusted else None
    texts = {CONFIG: dump_yaml(run_config)}
    if saved.tokenizer is not None:
        texts[TOKENIZER] = saved.tokenizer.to_json()
    write_folder(folder, texts, grown, max_shard_size, hashed=True, signature=signature)
    return Grown(folder, how, *sizes)


def grown_config(
    model: dict[str, Any], before: LanguageModel, layers: Mapping[int, Growth], init: Init, factor: int | None
) -> tuple[dict[str, Any], dict[int, str]]:
    """The key `model` of the larger model's config, and layer → how it grew.

    `model` is the key `model` of the present config, with all defaults; `factor` is how many times larger the states
    become, None for the default of each. A UserError if a layer cannot grow as asked.
    """
    if factor is not None and factor < 2:
        raise UserError(f"factor: {factor} must be at least 2, which is twice the state")
    change, how = {}, {}
    for layer, growth in layers.items():
        arguments = growth.arguments(factor or growth.default_factor(), init)
        change[layer] = partial(_with_arguments, arguments, growth.around)
        shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
        how[layer] = f"{type(growth.mixer).__name__}, {growth.way}: {shown}"
    return {**model, "stack": replaced(model["stack"], before.num_layers, change)}, how


def _with_arguments(arguments: Mapping[str, object], around: type | None, spec: Spec) -> Spec:
    """A mixer's config with other arguments, or inside a class with these arguments."""
    inner, expanded = spec.get("init_args", {}), spec["class_path"].rpartition(".")[2] == Expanded.__name__
    if expanded and around is None:  # by 1, as nothing else grows
        return {**spec, "init_args": {**inner, "mixer": _with_arguments(arguments, None, inner["mixer"])}}
    if expanded or around is None:
        return {**spec, "init_args": {**inner, **arguments}}
    return {"class_path": f"{around.__module__}.{around.__qualname__}", "init_args": {"mixer": spec, **arguments}}


def _size(model: LanguageModel) -> Size:
    states = (mixer.state_size() for mixer in model.mixers)
    return Size(model.num_parameters(), sum(int(state) for state in states if state < math.inf))


def chosen_layers(mixers: Sequence[TokenMixer], layers: int | list[int], way: str | None) -> dict[int, Growth]:
    """The layers that grow, in order, each with the way in which it does.

    If `layers` is a number, that many layers grow, uniformly from the first among those that can (StateX, section 4.4).
    A `way` of None is the first of each mixer. A UserError if a layer does not exist or cannot grow, there are too few,
    or no mixer knows the way.
    """
    way_names = sorted({growth.way for mixer in mixers for growth in growths(mixer)})
    if way is not None and way_names and way not in way_names:
        raise UserError(f"way: {way!r} is not one of {', '.join(way_names)}{did_you_mean(way, way_names)}")
    able = {
        layer: ways[0]
        for layer, mixer in enumerate(mixers)
        if (ways := [growth for growth in growths(mixer) if way in (None, growth.way)])
    }
    if isinstance(layers, int):
        if not able:
            raise UserError(f"layers: none can grow; layer 0 is {_reason(mixers[0], way)}")
        if not 1 <= layers <= len(able):
            raise UserError(f"layers: {layers} is not between 1 and {len(able)}, the number of layers that can grow")
        places = [list(able)[i * len(able) // layers] for i in range(layers)]
        return {layer: able[layer] for layer in places}
    if not layers or len(set(layers)) < len(layers):
        raise UserError(f"layers: {layers} is not a list of different layers, such as [0,6,12,18]")
    for layer in layers:
        if not 0 <= layer < len(mixers):
            raise UserError(f"layers: there is no layer {layer}; the model has the layers 0 to {len(mixers) - 1}")
        if layer not in able:
            raise UserError(f"layers: layer {layer} cannot grow, since it is {_reason(mixers[layer], way)}")
    return {layer: able[layer] for layer in sorted(layers)}


def _reason(mixer: TokenMixer, way: str | None) -> str:
    name = type(mixer).__name__
    if ways := [growth.way for growth in growths(mixer)]:
        return f"a {name} and the way is {way!r}; its ways are {', '.join(ways)}"
    expanded = getattr(getattr(mixer, "site", None), "expand", None) is not None
    return f"an expanded {name} already" if expanded else f"a {name}, which has no matrix state to make larger"
