"""Building models, data modules and trainer arguments from a parsed config."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace

from kernels import UserError
from zoo.config.parser import CLASSES, Parser, cause_of, read
from zoo.config.serialise import to_dict
from zoo.data.contract import vocabulary_of
from zoo.lm.model import LanguageModel


def instantiate(key: str, config: Namespace) -> Any:
    """Build the object of one key of a parsed config; for `trainer`, the arguments of the Trainer.

    Raises:
        UserError: The constructor rejects a value.
    """
    try:
        return _parser_of(key).instantiate(Namespace({key: config[key]}))[key]
    except Exception as error:
        if (cause := cause_of(error)) is not None:
            raise cause from None
        raise


@functools.cache
def _parser_of(key: str) -> Parser:
    """A parser of one key that builds its object."""
    parser = Parser()
    if key == "data":
        parser.add_subclass_arguments(L.LightningDataModule, "data", fail_untyped=False)
    else:
        parser.add_class_arguments(CLASSES[key], key, fail_untyped=False, instantiate=key != "trainer")
    return parser


def vocabulary(config: Namespace, datamodule: L.LightningDataModule | None = None) -> int | None:
    """`model.vocab_size`, or the vocabulary size of the data if it is null; None for a model without tokens.

    Args:
        config: A parsed config.
        datamodule: Its data module; None builds it if it is needed.

    Raises:
        UserError: The data has more tokens than the model, or nothing says how many there are.
    """
    size = config.model.vocab_size
    if config.model.inputs is not None and config.model.head is not None:
        return size
    if datamodule is None:
        if size is not None:
            return size
        datamodule = instantiate("data", config)
    tokens = vocabulary_of(datamodule)
    if size is None and tokens is None:
        name = type(datamodule).__name__
        raise UserError(f"model.vocab_size: null, but {name} has neither vocab_size nor get_tokenizer(); set it")
    if size is not None and tokens is not None and tokens > size:
        raise UserError(f"model.vocab_size: {size} is smaller than the tokenizer's {tokens} tokens")
    return size or tokens


def build(*configs_and_overrides: str | Path, device: torch.device | str | None = None) -> LanguageModel:
    """Build a model with fresh parameters from configs and overrides, applied in order.

    ``zoo.build("gdn_h2.yaml", "size/400m.yaml", "model.stack.second.factor=4", device="meta")``

    Args:
        configs_and_overrides: Paths or names of configs, and `key=value` overrides.
        device: Where the parameters are created.

    Raises:
        UserError: A config is missing, or a key or value is wrong.
    """
    config = read(*configs_and_overrides)
    config.model.vocab_size = vocabulary(config)
    model = from_config(config, device)
    model.config = to_dict(Namespace(model=config.model))
    return model


def from_config(config: Namespace, device: torch.device | str | None = None) -> LanguageModel:
    """Build the model of a parsed config whose `model.vocab_size` is set, unless it has no tokens."""
    with torch.device(device or "cpu"):
        return instantiate("model", config)
