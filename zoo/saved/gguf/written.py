"""A model in a public layout as one GGUF file."""

import math
import re
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from kernels import UserError
from mixers import did_you_mean
from zoo.checkpoints.tensor_files import Weights, warn_unless_finite
from zoo.data.text.tokenizer import Tokenizer
from zoo.files.atomic import atomic_write
from zoo.lm.model import LanguageModel
from zoo.saved.gguf.architectures import ARCHITECTURES, Stored, Value
from zoo.saved.gguf.vocabulary import fields_of
from zoo.saved.plan import Row, row
from zoo.saved.public.families import FAMILIES
from zoo.saved.public.family import GGUF
from zoo.saved.public.import_export import in_a_layout
from zoo.saved.public.tensors import origins

# types of numbers → llama.cpp's names of files that are mostly in them
_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}  # next to fp32
_LARGEST = {"F16": 65_504.0, "Q8_0": 127 * 65_504.0}  # absolute values; the scales of q8_0 are f16
FREQUENCIES = "rope_freqs.weight"
# tensors that llama.cpp wants in fp32, though they have two axes
_PRECISE = re.compile(r"norm\.weight$|ssm_conv1d|ssm_a$|ssm_d$|_lerp_|time_mix_[wavg]\d")


def check_type(quantize: str | None) -> None:
    """Refuse a `quantize` that is not a type of numbers."""
    if quantize is not None and quantize not in _TYPES:
        raise UserError(
            f"quantize: {quantize!r} is not one of {', '.join(_TYPES)}{did_you_mean(str(quantize), list(_TYPES))}"
        )


def write_gguf(
    file: Path,
    model: LanguageModel,
    weights: Weights,
    tokenizer: Tokenizer | None,
    context_length: int,
    quantize: str | None = None,
    dry_run: bool = False,
) -> list[Row]:
    """Write a model and its tokenizer as a GGUF file; memory holds one tensor at a time. Returns its tensors.

    Args:
        file: The file, which appears when it is complete.
        model: The model, on the meta device.
        weights: Its weights.
        tokenizer: Its tokenizer; without one, llama.cpp runs the file on token ids only.
        context_length: Tokens of a context, by default, in llama.cpp.
        quantize: `f32`, `f16`, `bf16` or `q8_0`, for matrices; vectors and convolutions are in fp32. None keeps the
            dtype of each matrix.
        dry_run: Whether to write nothing.

    Raises:
        UserError: A weight is too large for its type, no architecture of llama.cpp computes the model, none of its
            pre-tokenizers divides text as the tokenizer does, the package `gguf` is missing, or the file cannot be
            written.
    """
    gguf = library()
    public = in_a_layout(model, weights, [family for family in FAMILIES if family.name in ARCHITECTURES], GGUF)
    architecture, config = ARCHITECTURES[public.layout], public.config
    metadata = architecture.all_metadata(config)
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_name(file.stem)
    for key, value in {**metadata, "context_length": context_length, "vocab_size": model.vocab_size}.items():
        _add(writer, f"{architecture.name}.{key}", value)
    for key, value in fields_of(tokenizer, model.vocab_size).items():
        _add(writer, key, value)
    specs = public.weights.specs
    tensors: list[tuple[Stored, Any]] = []  # with their types
    rows: list[Row] = []
    widened: dict[str, list[str]] = {}  # type → tensors of it that llama.cpp needs in fp32
    for stored in (stored for name in specs for stored in architecture.tensors(config, name)):
        sources = [torch.empty(specs[source].shape, device="meta") for source in stored.sources]
        shape = tuple(stored.order(*sources).shape)
        name = llama_name(architecture.name, model.num_layers, stored)
        dtype = specs[stored.sources[0]].dtype if stored.sources else None
        number_type = gguf.GGMLQuantizationType[_type(name, shape, quantize or _kind(dtype)).upper()]
        if quantize is None and (kind := _kind(dtype)) != number_type.name.lower():
            widened.setdefault(kind, []).append(name)
        block, block_bytes = gguf.GGML_QUANT_SIZES[number_type]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), prod(shape) // block * block_bytes, number_type)
        tensors.append((stored, number_type))
        rows.append(row(origins(public.weights, *stored.sources), name, shape, number_type.name.lower()))
    if dry_run:
        return rows
    for kind, widened_names in widened.items():  # so that they return in their dtypes
        writer.add_array(f"zoo.{kind}", widened_names)
    main = quantize or _kind(weights.specs["embeddings.weight"].dtype)
    writer.add_file_type(gguf.LlamaFileType[_TYPES[main]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    try:
        with atomic_write(file) as opened:
            writer.write_header_to_file(Path(opened.name))
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for stored, number_type in tensors:
                tensor = stored.made(*(public.weights.tensor(source).float() for source in stored.sources))
                _check_range(stored.name, tensor, number_type.name)
                writer.write_tensor_data(gguf.quants.quantize(tensor.contiguous().numpy(), number_type))
            writer.close()
        return rows
    except OSError as error:
        raise UserError(f"output: {file} cannot be written: {error.strerror or error}") from error


def _kind(dtype: torch.dtype | None) -> str:
    """Return the type of the numbers of a dtype."""
    return next((kind for kind, each in DTYPES.items() if each == dtype), "f32")


def llama_name(architecture: str, num_layers: int, stored: Stored) -> str:
    """Return llama.cpp's name of a tensor in a model with as many layers."""
    public = stored.name.replace(".dt_bias", ".dt_proj.bias")
    return _names(architecture, num_layers).get_name(public, (".weight", ".bias")) or stored.name


@cache
def _names(architecture: str, num_layers: int) -> Any:
    gguf = library()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, num_layers)


def _check_range(name: str, tensor: torch.Tensor, number_type: str) -> None:
    """Refuse finite values that are too large for the type; warn of values that are not finite."""
    warn_unless_finite(name, tensor)
    largest = float(tensor.nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0
    if largest > _LARGEST.get(number_type, math.inf):
        raise UserError(
            f"quantize: {number_type.lower()} holds values up to {_LARGEST[number_type]:g}, and {name} has "
            f"{largest:g}; use bf16 or f32."
        )


def _type(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """Return the type of a tensor, of which q8_0 needs rows of blocks of 32."""
    if len(shape) < 2 or _PRECISE.search(name):
        return "f32"
    return "f16" if wanted == "q8_0" and shape[-1] % 32 else wanted


def _add(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    else:
        writer.add_uint32(key, value)


def library(option: str = "to") -> ModuleType:
    """Import the package gguf; a UserError that begins with `option` if it is missing."""
    try:
        import gguf  # imported here, since only this target needs it
    except ImportError:
        raise UserError(f"{option}: gguf needs the package gguf; pip install 'token-mixer-zoo[gguf]'") from None
    return gguf
