"""The weights of the larger model: layers that stay keep theirs bit by bit, the others follow their mixer's rule."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import UserError
from mixers import Growth, growths
from mixers.growth import Init
from mixers.interface import streams_of
from zoo.checkpoints.tensor_files import Spec, Weights
from zoo.lm import LanguageModel
from zoo.lm.block import mix
from zoo.saved.public.tensors import ComputedWeights

TOLERANCE = 1e-4  # of a layer's outputs with `preserve`, relative to their norm, in fp32
TOKENS = 32  # on which they are compared


def grown_weights(
    after: LanguageModel, before: LanguageModel, weights: Weights, layers: Mapping[int, Growth], init: Init, seed: int
) -> Weights:
    """The weights of a larger model: new ones are in memory, all others are read one at a time.

    Every tensor keeps its dtype. A new one has that of the largest tensor of its layer, unless its module keeps it in
    fp32. Both models are on the meta device, and are used up. A UserError if `init` is preserve, and a layer computes
    something else than before.
    """
    shapes, made = after.state_dict(), dict[str, Tensor]()
    dtypes = {layer: new_dtypes(after, layer, weights) for layer in layers}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            block: Any = after.layers[layer]
            for part in (block.mixer, block.mixer_norm):  # an MLP never changes
                part.to_empty(device="cpu")
        after.reset_parameters()
    for layer, growth in layers.items():
        tensors = _of_layer(after, layer, growth, init, weights, dtypes[layer])
        if init == "preserve":
            _check_preserved(before, after, layer, weights, tensors)
        made |= tensors
    specs = {
        name: Spec(tuple(made[name].shape), made[name].dtype) if name in made else weights.specs[name]
        for name in shapes
    }
    return ComputedWeights(specs, lambda name: made[name] if name in made else weights.tensor(name))


def new_dtypes(after: LanguageModel, layer: int, weights: Weights) -> dict[str, torch.dtype]:
    """Part of a layer (on the meta device) → the dtype that it has if it is new."""
    stored = [spec for name, spec in weights.specs.items() if name.startswith(f"layers.{layer}.")]
    block = after.layers[layer].to(max(stored, key=lambda spec: math.prod(spec.shape)).dtype)
    dtypes = {name: tensor.dtype for name, tensor in block.state_dict().items()}
    block.float()
    return dtypes


@torch.no_grad()
def _of_layer(
    after: LanguageModel,
    layer: int,
    growth: Growth,
    init: Init,
    weights: Weights,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """The tensors of a layer that are not as they were."""
    block, tensors = f"layers.{layer}.", dict[str, Tensor]()
    own = growths(growth.mixer)[0]  # says what `reinit` renews, in whichever way the layer grows
    shared = _shared_names(after, block)
    for name, fresh in after.layers[layer].state_dict().items():
        in_mixer, whole = name.startswith("mixer."), block + name
        part = name.removeprefix("mixer.")
        renewed = part.startswith(own.renewed) if in_mixer else own.renews_norm and name.startswith("mixer_norm.")
        if (stored := weights.specs.get(whole)) is None:
            tensors[whole] = fresh.to(dtypes[name])
        elif init == "reinit" and renewed and whole not in shared:
            tensors[whole] = fresh.to(stored.dtype)
        elif stored.shape != fresh.shape:  # means are taken in fp32
            tensors[whole] = growth.resized(part, weights.tensor(whole).float(), fresh, init).to(stored.dtype)
    return tensors


def _shared_names(model: LanguageModel, block: str) -> set[str]:
    """The names of a block's parameters that belong to other blocks, too."""
    named = list(model.named_parameters(remove_duplicate=False))
    elsewhere = {id(parameter) for name, parameter in named if not name.startswith(block)}
    return {name for name, parameter in named if name.startswith(block) and id(parameter) in elsewhere}


@torch.no_grad()
def _check_preserved(
    before: LanguageModel, after: LanguageModel, layer: int, weights: Weights, tensors: Mapping[str, Tensor]
) -> None:
    """Compare the outputs on random inputs: whether they are preserved depends on a mixer's options, too."""
    prefix, (old, new) = f"layers.{layer}.mixer.", (model.mixers[layer] for model in (before, after))
    old.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        before.reset_parameters()  # initialises what is not a weight, such as constant decays
    old.load_state_dict({name: weights.tensor(prefix + name).float() for name in old.state_dict()})
    now = {
        name: tensors[whole] if (whole := prefix + name) in tensors else weights.tensor(whole)
        for name in new.state_dict()
    }
    new.load_state_dict({name: tensor.float() for name, tensor in now.items()})
    old.eval()
    new.eval()
    x = torch.randn(1, TOKENS, before.hidden_size, generator=torch.Generator().manual_seed(0))
    passed = _passed_below(before, layer, x)
    expected, computed = (mix(mixer, x, None, None, None, passed)[0] for mixer in (old, new))
    old.to("meta")
    if not (computed - expected).norm() <= TOLERANCE * expected.norm():
        raise UserError(
            f"init: preserve is impossible for layer {layer}, as {type(old).__name__} with these arguments computes "
            "something else with a larger state; choose reinit or inherit"
        )


def _passed_below(model: LanguageModel, layer: int, x: Tensor) -> Mapping[str, Tensor]:
    """Random streams in the shapes that the layers below pass for such an input."""
    passed: Mapping[str, Tensor] = {}
    for mixer in model.mixers[:layer]:
        if streams_of(mixer) and set(passed) != set(model.mixers[layer].site.passed):
            mixer.to_empty(device="cpu")  # any weights give these shapes
            *_, passed = mix(mixer, x, None, None, None, passed)
            mixer.to("meta")
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(stream.shape, generator=generator) for name, stream in passed.items()}
