"""The data module interface: batches, and the source of the vocabulary size. Any of Lightning's data modules may
implement it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import UserError
from zoo.data.batch import NO_LOSS, Batch

KEYS = ("input_ids", "labels", "attention_mask", "cu_seqlens")  # of a batch that is a mapping
TOKENIZER = ("vocab_size", "eos_id", "encode", "decode", "to_json", "save")  # what a tokenizer has


def as_batch(batch: Any) -> Batch:
    """A batch of any data module, from a `Batch` or a mapping.

    A mapping follows the convention of Hugging Face: `labels` [B,T] are aligned with `input_ids` [B,T], and are shifted
    here. Padding at the end, by `attention_mask`, has no loss; neither has the first token of a document packed by
    `cu_seqlens`.

    Raises:
        UserError: It is neither, a key is missing or unknown, or the shapes do not fit.
    """
    if isinstance(batch, Batch):
        return batch
    if not isinstance(batch, Mapping):
        raise UserError(
            f"data: a batch is a {type(batch).__name__}; it must be a zoo.data.Batch, or a mapping with input_ids and "
            "labels."
        )
    for key in ("input_ids", "labels"):
        if key not in batch:
            raise UserError(f"data: a batch has {', '.join(map(str, batch)) or 'no keys'}, but no {key}.")
    if unknown := [str(key) for key in batch if key not in KEYS]:
        raise UserError(f"data: a batch has {unknown[0]}, which would not be used; its keys are {', '.join(KEYS)}.")
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.is_floating_point():
            raise UserError(f"data: {key} of a batch is not a tensor of integers, but {_described(value)}.")
    tokens, labels = batch["input_ids"].long(), batch["labels"].long()
    mask, bounds = batch.get("attention_mask"), batch.get("cu_seqlens")
    if tokens.ndim != 2 or labels.shape != tokens.shape or (mask is not None and mask.shape != tokens.shape):
        shapes = ", ".join(f"{key} {tuple(batch[key].shape)}" for key in KEYS[:3] if key in batch)
        raise UserError(f"data: the shapes of a batch are {shapes}; they must be the same, of sequences and positions.")
    if mask is not None:
        if bool((mask.bool()[:, 1:] > mask.bool()[:, :-1]).any()):
            raise UserError("data: attention_mask of a batch has padding before tokens; pad at the end.")
        labels = labels.masked_fill(mask == 0, NO_LOSS)
    if bounds is not None:
        labels = labels.index_fill(1, bounds[1:-1].long().to(labels.device), NO_LOSS)
        bounds = bounds.to(torch.int32)
    following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], NO_LOSS)], dim=1)
    return Batch(tokens, following, bounds)


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise a UserError if tokens or labels are none of the vocabulary; on a GPU an embedding would end the process.

    Batches that are on a GPU already are not looked at, since that would wait for it.
    """
    for name, values, lowest in (("tokens", batch.tokens, 0), ("labels", batch.labels, NO_LOSS)):
        if values.device.type != "cpu" or values.is_floating_point() or not values.numel():
            continue
        low, high = (int(value) for value in values.aminmax())
        if low < lowest or high >= vocab_size:
            raise UserError(
                f"data: {name} of a batch are from {low} to {high}; with model.vocab_size {vocab_size} they must be "
                f"from 0 to {vocab_size - 1}."
            )


def tokenizer_of(datamodule: Any) -> Any:
    """The tokenizer of a data module; None if it has no `get_tokenizer()`, or that returns None.

    Raises:
        UserError: It is not a tokenizer like `zoo.data.Tokenizer`.
    """
    tokenizer = datamodule.get_tokenizer() if hasattr(datamodule, "get_tokenizer") else None
    if tokenizer is not None and (missing := [name for name in TOKENIZER if not hasattr(tokenizer, name)]):
        raise UserError(
            f"data: {type(datamodule).__name__}.get_tokenizer() returns a {type(tokenizer).__name__}, which has no "
            f"{missing[0]}; return a zoo.data.Tokenizer, such as Tokenizer.from_json of a Hugging Face tokenizer's "
            "backend_tokenizer.to_str()."
        )
    return tokenizer


def vocabulary_of(datamodule: Any) -> int | None:
    """The number of tokens: of the tokenizer, or else the `vocab_size` of the data; None if it has neither."""
    tokenizer = tokenizer_of(datamodule)
    return getattr(datamodule, "vocab_size", None) if tokenizer is None else tokenizer.vocab_size


def _described(value: Any) -> str:
    return f"of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
