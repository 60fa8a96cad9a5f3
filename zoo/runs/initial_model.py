"""The model of a run that starts from weights and names no model of its own."""

from collections.abc import Mapping
from typing import Any

from zoo.checkpoints.signature import is_own
from zoo.config.trust import user_input
from zoo.loading.load import described, find, model_config

Items = list[str | dict[str, Any]]  # what `load_items` returns


def with_initial_model(items: Items, trust: bool) -> Items:
    """The items, behind the model of `optim.initial_weights` if none of them names a stack.

    A file of weights alone has no model; the parser then says that one is missing.

    Args:
        items: Loaded configs and overrides.
        trust: Whether that model may name any class, even if someone else wrote it.

    Raises:
        UserError: There are no such weights, they are damaged, or their model is not trusted.
    """
    if any(key == "model.stack" or key.startswith("model.stack.") for key in user_input(items).keys):
        return items
    path = _initial_weights(items)
    if path is None or path.endswith(".safetensors"):
        return items
    found = find(path)
    config = model_config(found, trust)
    if not (trust or is_own(found.config, found.signature)):
        described(found, trust=False)  # compares its sizes with its weights
    return [{"model": config}, *items]


def _initial_weights(items: Items) -> str | None:
    """The last value of `optim.initial_weights` among the items."""
    found: Any = None
    for item in items:
        if isinstance(item, str):
            key, _, value = item.partition("=")
            found = value if key == "optim.initial_weights" else found
        elif isinstance(section := item.get("optim"), Mapping):
            found = section.get("initial_weights", found)
    return found if isinstance(found, str) and found != "null" else None
