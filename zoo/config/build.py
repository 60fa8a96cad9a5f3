"""What a parsed config describes, built."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from kernels import UserError
from zoo.config.parser import CLASSES, read, said
from zoo.lm.model import LanguageModel


def instantiate(key: str, config: Namespace) -> Any:
    """Build one key of a parsed config; `trainer` gives the arguments of the Trainer."""
    parser = LightningArgumentParser()
    if key == "data":
        parser.add_subclass_arguments(L.LightningDataModule, "data", fail_untyped=False)
    else:
        parser.add_class_arguments(CLASSES[key], key, fail_untyped=False, instantiate=key != "trainer")
    try:
        return parser.instantiate(Namespace({key: config[key]}))[key]
    except Exception as error:
        if (own := said(error)) is not None:
            raise own from None
        raise


def vocabulary(config: Namespace, tokens: int | None = None) -> int:
    """`model.vocab_size`, or that of the data where it is null.

    Args:
        config: A parsed config.
        tokens: What `vocabulary_of` says of the data module; None builds one and asks.

    Raises:
        UserError: The data has more tokens than the model.
    """
    size = config.model.vocab_size
    if tokens is None:
        if size is not None:
            return size
        return vocabulary_of(instantiate("data", config))
    if size is not None and tokens > size:
        raise UserError(f"model.vocab_size: {size} is smaller than the tokenizer's {tokens} tokens")
    return size or tokens


def vocabulary_of(datamodule: Any) -> int:
    """Number of tokens: of the data module's tokenizer, or of the data itself where there is none."""
    tokenizer = datamodule.get_tokenizer()
    return datamodule.vocab_size if tokenizer is None else tokenizer.vocab_size


def build(*configs_and_overrides: str | Path, device: torch.device | str | None = None) -> LanguageModel:
    """The model of configs and overrides, in order, with fresh parameters.

    ``zoo.build("gdn_h2.yaml", "size/400m.yaml", "model.stack.second.factor=4", device="meta")``

    Args:
        configs_and_overrides: Paths or names of configs, and `key=value` overrides.
        device: Where the parameters are made.

    Raises:
        UserError: A config is missing, or a key or value is wrong.
    """
    config = read(*configs_and_overrides)
    config.model.vocab_size = vocabulary(config)
    return from_config(config, device)


def from_config(config: Namespace, device: torch.device | str | None = None) -> LanguageModel:
    """The model of a parsed config whose vocabulary is known."""
    with torch.device(device or "cpu"):
        return instantiate("model", config)
