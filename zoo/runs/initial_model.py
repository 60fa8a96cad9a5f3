"""The model of a run that starts from weights and names no model."""

from collections.abc import Mapping
from typing import Any

from zoo.saved.model import SavedModel
from zoo.saved.trust import user_input

Items = list[str | dict[str, Any]]  # what `load_items` returns


def with_initial_model(items: Items, trust: bool) -> Items:
    """The items, behind the model of `optim.initial_weights` if none of them names a stack.

    A file of weights alone has no model; the parser then says that one is missing.

    Args:
        items: Loaded configs and overrides.
        trust: Whether that model may name any class, even if someone else wrote it.

    Raises:
        UserError: The weights do not exist, are damaged, or their model is not trusted.
    """
    if any(key == "model.stack" or key.startswith("model.stack.") for key in user_input(items).keys):
        return items
    path = _initial_weights(items)
    if path is None or path.endswith(".safetensors"):
        return items
    saved = SavedModel.open(path, trust)
    config = saved.model_config
    if not saved.is_trusted:
        saved.check_sizes()
    return [{"model": config}, *items]


def _initial_weights(items: Items) -> str | None:
    """The last value of `optim.initial_weights` among the items."""
    path: Any = None
    for item in items:
        if isinstance(item, str):
            key, _, value = item.partition("=")
            path = value if key == "optim.initial_weights" else path
        elif isinstance(section := item.get("optim"), Mapping):
            path = section.get("initial_weights", path)
    return path if isinstance(path, str) and path != "null" else None
