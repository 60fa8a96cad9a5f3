"""Building models, data modules and trainer arguments from a parsed config."""

from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import Namespace

from kernels import UserError
from zoo.config.keys import OF_LIGHTNING
from zoo.config.overlays import Item, load_items
from zoo.config.parser import read, read_model, run_keys
from zoo.config.resolve import built, built_arguments
from zoo.config.serialise import to_dict
from zoo.config.signatures import Parameter
from zoo.data.contract import vocabulary_of
from zoo.lm.creation import created_on
from zoo.lm.model import TOLERANCE, LanguageModel
from zoo.lm.stack import Stack
from zoo.train.devices import check_device

if TYPE_CHECKING:  # importing it takes three times as long as PyTorch, and a model is built without it
    import lightning as L


def instantiate(key: str, config: Namespace) -> Any:
    """Build the object of one key of a resolved config; for `trainer`, the arguments of the Trainer.

    Raises:
        UserError: The constructor rejects a value.
    """
    entry = run_keys(lightning=key in OF_LIGHTNING)[key]
    if isinstance(entry, Parameter):
        return built(config[key], entry.hint)
    arguments = built_arguments(entry.cls, config[key])
    return arguments if key == "trainer" else entry.cls(**arguments)


def captures_steps(config: Namespace) -> bool:
    """Return whether a run on a GPU captures its training steps; null means unless it is compiled."""
    return bool(config.cuda_graph or (config.cuda_graph is None and not config.compile))


def vocabulary(
    config: Namespace, datamodule: "L.LightningDataModule | None" = None, tokens: int | None = None
) -> int | None:
    """`model.vocab_size`, or the vocabulary size of the data if it is null; None for a model without tokens.

    Args:
        config: A parsed config.
        datamodule: Its data module; None builds it if it is needed.
        tokens: The vocabulary size of the data; None asks the data module, which may train a tokenizer.

    Raises:
        UserError: The data has more tokens than the model, or nothing says how many there are.
    """
    size = config.model.vocab_size
    if config.model.inputs is not None and config.model.head is not None:
        return size
    if datamodule is None:
        if not _needs_data(config.model):
            return size
        datamodule = instantiate("data", config)
    tokens = vocabulary_of(datamodule) if tokens is None else tokens
    if size is None and tokens is None:
        name = type(datamodule).__name__
        raise UserError(f"model.vocab_size: null, but {name} has neither vocab_size nor get_tokenizer(); set it")
    if size is not None and tokens is not None and tokens > size:
        raise UserError(f"model.vocab_size: {size} is smaller than the tokenizer's {tokens} tokens")
    return size or tokens


def _needs_data(model: Namespace) -> bool:
    """Return whether the vocabulary size has to come from the data."""
    return model.vocab_size is None and (model.inputs is None or model.head is None)


def build(*configs_and_overrides: Item, device: torch.device | str | None = None) -> LanguageModel:
    """Build a model with fresh parameters from configs and overrides, applied in order.

    ``zoo.build("gdn_h2.yaml", "size/400m.yaml", "model.stack.second.factor=4", device="meta")``

    Of the keys that a model does not depend on, what is in `data`, `trainer` and callbacks is not checked, unless the
    data has to say how many tokens there are.

    Args:
        configs_and_overrides: As for `fit`.
        device: Where the parameters are created.

    Raises:
        UserError: A config is missing, or a key or value is wrong.
    """
    if device is not None:
        check_device(device)
    items = load_items(configs_and_overrides)
    config = read_model(*items)
    if _needs_data(config.model):
        config = read(*items)
    config.model.vocab_size = vocabulary(config)
    model = from_config(config, device)
    model.config = to_dict(Namespace(model=config.model))
    return model


def from_config(config: Namespace, device: torch.device | str | None = None) -> LanguageModel:
    """Build the model of a parsed config whose `model.vocab_size` is set, unless it has no tokens.

    It sets `model.num_layers` in the config if that is null.
    """
    if config.model.num_layers is None:
        config.model.num_layers = _nearest_depth(config)
    with created_on(device or "cpu"):
        return instantiate("model", config)


def _nearest_depth(config: Namespace, step: int | None = None) -> int:
    """Return the number of layers with which a model is closest to its nominal size, counted on the meta device.

    It is a multiple of `step`, by default of the stack's period if that is within the tolerance of the nominal size.
    """
    if (nominal := config.model.nominal_size) is None:
        raise UserError("model.num_layers: null means the depth closest to model.nominal_size, which is null as well")
    trial, sizes, unit = config.clone(), dict[int, float](), step or built(config.model.stack, Stack).period
    trial.model.nominal_size = None  # the model would warn of the difference
    depth = max(8 // unit, 1) * unit
    while depth not in sizes:
        trial.model.num_layers = depth
        model = from_config(trial, "meta")
        sizes[depth] = abs(model.num_parameters() / nominal - 1)
        of_layer = sum(p.numel() for p in model.layers.parameters()) / depth
        depth = max(1, round((depth + (nominal - model.num_parameters()) / of_layer) / unit)) * unit
    best = min(sizes, key=lambda number: sizes[number])
    return best if step or sizes[best] <= TOLERANCE else _nearest_depth(config, 1)
