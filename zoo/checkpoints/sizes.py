"""Sizes in a foreign config, compared with the weights that it comes with before anything of that size is built."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kernels.errors import UserError

_NO_SIZES = ("base", "nominal_size")  # numbers that may be larger than a model
# Sizes that no weight has: what a state or a cache holds grows with them.
_LIMITS = {"window_size": 1 << 20, "factor": 1 << 10}


def check_sizes(model: Mapping[str, Any], weights: Mapping[str, Any], path: object) -> None:
    """Check that no number in a config is larger than its weights allow, without building the model.

    Building 300,000 layers takes minutes even without memory for their weights. What passes is small enough to be built
    on the meta device, where names and shapes are compared exactly.

    Args:
        model: The `model` config, in plain containers.
        weights: Name → anything with a shape.
        path: Where they come from, for messages.

    Raises:
        UserError: A number is too large; it is named.
    """
    elements = sum(math.prod(tensor.shape) for tensor in weights.values())
    for key, number in _numbers(model, "model"):
        name = key.rpartition(".")[2]
        most = len(weights) if name == "num_layers" else _LIMITS.get(name, elements)
        if name not in _NO_SIZES and number > most:
            shown = f"{number:,}" if number < 1e18 else "more than 10^18"  # Python refuses to write very long integers
            raise UserError(
                f"{path} does not fit the model: {key} is {shown} in its config, which is too large for its weights "
                f"({len(weights):,} tensors of {elements:,} numbers)."
            )


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, key if name == "init_args" else f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
