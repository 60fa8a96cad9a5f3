"""The weights of the larger model: layers that stay keep theirs bit by bit, the others follow their mixer's rule."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels import UserError
from mixers import Growth, TokenMixer, growths
from mixers.growth import Init
from zoo.lm import LanguageModel

TOLERANCE = 1e-4  # of a layer's outputs with `preserve`, relative to their norm, in fp32
TOKENS = 32  # on which they are compared


def fill(after: LanguageModel, before: LanguageModel, layers: Mapping[int, Growth], init: Init, seed: int) -> None:
    """Give a larger model, built on the meta device, its weights.

    Args:
        after: The larger model; afterwards it is on the CPU.
        before: The trained model.
        layers: The layers that grow.
        init: What happens to the weights of their mixers.
        seed: Seed of new weights.

    Raises:
        UserError: `init` is preserve, and a layer computes something else than before.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in layers:
            after.layers[layer].to_empty(device="cpu")
        after.reset_parameters()
    fresh, weights = after.state_dict(), before.state_dict()
    weights = {name: tensor for name, tensor in weights.items() if name in fresh}
    for layer, growth in layers.items():
        weights |= _of_layer(after, layer, growth, init, fresh, weights)
    after.load_state_dict(weights, assign=True)
    if init == "preserve":
        for layer in layers:
            _check_preserved(before.mixers[layer], after.mixers[layer], layer, before.hidden_size)


def _of_layer(
    after: LanguageModel,
    layer: int,
    growth: Growth,
    init: Init,
    fresh: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    block, of_mixer, found = f"layers.{layer}.", f"layers.{layer}.mixer.", {}
    own = growths(growth.mixer)[0]  # says what `reinit` renews, in whichever way the layer grows
    shared = _shared_names(after, block)
    for name in (name for name in fresh if name.startswith(block)):
        part, old, new = name.removeprefix(of_mixer), weights.get(name), fresh[name]
        if name.startswith(of_mixer):
            renewed = part.startswith(own.renewed)
        else:
            renewed = own.renews_norm and name.startswith(f"{block}mixer_norm.")
        if old is None or (init == "reinit" and renewed and name not in shared):
            found[name] = new
        elif old.shape == new.shape:
            found[name] = old
        else:
            found[name] = growth.resized(part, old, new, init).contiguous()
    return found


def _shared_names(model: LanguageModel, block: str) -> set[str]:
    """The names of a block's parameters that belong to other blocks, too."""
    named = list(model.named_parameters(remove_duplicate=False))
    elsewhere = {id(parameter) for name, parameter in named if not name.startswith(block)}
    return {name for name, parameter in named if name.startswith(block) and id(parameter) in elsewhere}


def _check_preserved(before: TokenMixer, after: TokenMixer, layer: int, hidden_size: int) -> None:
    """Compare the outputs on random inputs: whether they are preserved depends on a mixer's options, too."""
    x = torch.randn(1, TOKENS, hidden_size, generator=torch.Generator().manual_seed(0)).to(before.in_stream.dtype)
    with torch.no_grad():
        expected, found = before(x)[0], after(x)[0]
    if not (found - expected).norm() <= TOLERANCE * expected.norm():
        raise UserError(
            f"init: preserve is impossible for layer {layer}, as {type(before).__name__} with these arguments computes "
            "something else with a larger state; choose reinit or inherit"
        )
