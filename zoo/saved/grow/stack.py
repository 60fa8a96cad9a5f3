"""The stack of a config with other mixers in some layers: a Pattern that spells out all layers."""

import string
from collections.abc import Callable, Mapping
from typing import Any

from kernels import UserError
from zoo.lm import H1, H2, Pattern, Uniform

Spec = dict[str, Any]  # a component in a config: class_path and init_args


def replaced(stack: Spec, num_layers: int, change: Mapping[int, Callable[[Spec], Spec]]) -> Spec:
    """The resolved `stack`, as a Pattern, with other mixers in the layers of `change` (layer → function of its config).

    Layers of one letter that become equal share a new letter. A UserError if the stack is of another
    class than these of the project, or has too many different mixers for the alphabet.
    """
    arguments, name = dict(stack["init_args"]), stack["class_path"].rpartition(".")[2]
    if name == Pattern.__name__:
        pattern, mixers = arguments.pop("pattern"), dict(arguments.pop("mixers"))
    elif name in (Uniform.__name__, H1.__name__, H2.__name__):
        mixers = dict(zip(string.ascii_uppercase, arguments.values(), strict=False))
        pattern, arguments = "".join(mixers), {}
    else:
        raise UserError(f"stack: {name} is not Uniform, H1, H2 or Pattern, so its layers cannot be changed one by one")
    pattern = "".join(pattern[layer % len(pattern)] for layer in range(num_layers))
    spare = iter(sorted(set(string.ascii_letters) - set(pattern)))
    came_from: dict[str, str] = {}
    written = list(pattern)
    for layer, changed in change.items():
        spec, before = changed(mixers[pattern[layer]]), pattern[layer]
        letter = next((new for new, old in came_from.items() if old == before and mixers[new] == spec), None)
        if letter is None:
            if (letter := next(spare, None)) is None:
                raise UserError(f"stack: more than {len(string.ascii_letters)} different mixers have no letters left")
            mixers[letter], came_from[letter] = spec, before
        written[layer] = letter
    for name, value in arguments.items():  # other arguments of a pattern list letters that something is true of
        if isinstance(value, str):
            arguments[name] = "".join(
                c for c in value + "".join(came_from) if c in written and came_from.get(c, c) in value
            )
    used = {letter: spec for letter, spec in mixers.items() if letter in written}
    return {
        "class_path": f"{Pattern.__module__}.{Pattern.__qualname__}",
        "init_args": {**arguments, "pattern": "".join(written), "mixers": used},
    }
