"""Selection of the layers that grow, and their new sizes."""

from collections.abc import Sequence

from kernels import UserError
from mixers import Growth, TokenMixer, did_you_mean, growths


def chosen_layers(mixers: Sequence[TokenMixer], layers: int | list[int], way: str | None) -> dict[int, Growth]:
    """The layers that grow, in order, each with the way in which it does.

    Args:
        mixers: The mixers of all layers.
        layers: The layers; or how many, uniformly from the first among those that can grow (StateX, section 4.4).
        way: The name of a way; None for the first of each mixer.

    Raises:
        UserError: A layer does not exist or cannot grow, there are too few, or no mixer knows the way.
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
