"""A GGUF file, read as a folder of the public layout that its architecture corresponds to."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import UserError
from zoo.checkpoints.tensor_files import Spec
from zoo.saved.gguf.architectures import ARCHITECTURES, Stored, llama3_of
from zoo.saved.gguf.vocabulary import tokenizer_of
from zoo.saved.gguf.written import DTYPES, FREQUENCIES, library, llama_name
from zoo.saved.public.families import FAMILIES
from zoo.saved.public.family import TIED, is_off
from zoo.saved.public.folder import CONFIG, PublicFolder
from zoo.saved.public.import_export import on_meta
from zoo.saved.public.mapping import TensorMap
from zoo.saved.public.tensors import ComputedWeights
from zoo.saved.public.tokenizer import DESCRIPTION, GENERATION, TOKENIZER

# metadata without effect on what a model computes for given tokens
_HARMLESS = ("context_length", "vocab_size", "rope.scaling.finetuned", "full_attention_interval")
_SAME = 1e-6  # relative difference of numbers that were rounded to fp32


class GgufFile(PublicFolder):
    """A GGUF file. Quantised tensors become fp32, others keep their dtype; memory holds one tensor at a time.

    Raises:
        UserError: The file is damaged, its architecture is unknown, or its graph computes something else than the
            layout can say.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        gguf = library("checkpoint")
        try:
            reader = gguf.GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
            self._stored: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # the library raises many types for damaged files
            raise UserError(f"checkpoint: {path} cannot be read as GGUF: {' '.join(str(error).split())}.") from None
        name = self._fields.get("general.architecture")
        names = {ARCHITECTURES[family].name: family for family in reversed(list(ARCHITECTURES))}
        if name not in names:
            allowed = ", ".join(sorted(names))
            raise UserError(f"checkpoint: {path} has the architecture {str(name)!r:.80}, which is none of {allowed}.")
        self._architecture = ARCHITECTURES[names[name]]
        self._family = next(family for family in FAMILIES if family.name == names[name])

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        """The metadata of the architecture; fp32 numbers are the shortest decimals that round to them."""
        prefix = f"{self._architecture.name}."
        ours = {key.removeprefix(prefix): value for key, value in self._fields.items() if key.startswith(prefix)}
        return {key: float(str(np.float32(v))) if isinstance(v, float) else v for key, v in ours.items()}

    @cached_property
    def _basic(self) -> dict[str, Any]:
        """The keys of config.json that the file says."""
        metadata, stored = self._metadata, self._stored
        keys = {**self._architecture.keys, "max_position_embeddings": "context_length"}
        config = {key: metadata[name] for key, name in keys.items() if name in metadata}
        try:
            config["model_type"], config["num_hidden_layers"] = self._family.model_types[0], metadata["block_count"]
            config |= self._architecture.config(metadata, stored.keys())
            embeddings = stored["token_embd.weight"]
            config["vocab_size"] = int(embeddings.shape[1])
            head = stored.get("output.weight", embeddings)
            config[TIED] = head.data.shape == embeddings.data.shape and np.array_equal(head.data, embeddings.data)
            if FREQUENCIES in stored:
                divisors = torch.from_numpy(self._numbers(FREQUENCIES))
                config["rope_scaling"] = llama3_of(divisors, metadata.get("rope.freq_base", 10000.0))
        except KeyError as error:
            raise UserError(f"checkpoint: {self.path} lacks {error.args[0]}.") from None
        except UserError as error:
            raise UserError(f"checkpoint: {self.path}: {error}.") from None
        ends = [self._fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return {**config, "eos_token_id": [number for number in ends if number is not None]}

    @cached_property
    def _complete(self) -> tuple[TensorMap, dict[str, Any]]:
        """The tensors of the public layout, and its whole config.json."""
        try:
            config = self._family.read(self._basic)
            model = on_meta(config)
        except UserError as error:
            raise UserError(f"checkpoint: {self.path}, as {error}") from None
        return TensorMap(self._family, model), self._family.write(model)

    def config(self, name: str = CONFIG) -> dict[str, Any]:
        """Return the contents of config.json, or of a file about the tokenizer.

        Metadata with which the model that is read would not be written is left in it, for the family to refuse.
        """
        if name in (GENERATION, DESCRIPTION):
            return {key: self._basic[key] for key in ("eos_token_id",) if name == GENERATION}
        expected = self._architecture.all_metadata(self._complete[1])
        others = {
            f"{self._architecture.name}.{key}": value
            for key, value in self._metadata.items()
            if key not in _HARMLESS and not (_equal(value, expected[key]) if key in expected else is_off(value))
        }
        return self._basic | others

    def has(self, name: str) -> bool:
        """Return whether a folder with this model would have a file of that name."""
        return name == GENERATION or (name == TOKENIZER and self._tokenizer is not None)

    def text(self, name: str) -> str:
        """Return the tokenizer's JSON."""
        return self._tokenizer or ""

    @cached_property
    def _tokenizer(self) -> str | None:
        return tokenizer_of(self._fields, str(self.path))

    @cached_property
    def weights(self) -> ComputedWeights:
        """The weights, under the names of the public layout; tensors without a place there keep their own."""
        (table, config), stored = self._complete, self._stored
        places: dict[str, list[tuple[Stored, str]]] = {name: [] for name in table.shapes}
        for part in (part for name in table.shapes for part in self._architecture.tensors(config, name)):
            for source in part.sources:
                name = llama_name(self._architecture.name, config["num_hidden_layers"], part)
                places[source].append((part, name))
        used = {name for parts in places.values() for _, name in parts} | {FREQUENCIES}
        specs = {name: Spec(tuple(tensor.shape), torch.float32) for name, tensor in stored.items() if name not in used}
        for public, parts in places.items():
            if all(name in stored for _, name in parts):
                specs[public] = Spec(table.shapes[public], self._dtype(parts[0][1]))

        def read(public: str) -> Tensor:
            whole = torch.empty(math.prod(table.shapes[public]))
            for part, name in places[public]:
                numbers, places_of_numbers = self._numbers(name), _numbered(part, public, table.shapes)
                if numbers.shape != (shape := tuple(places_of_numbers.shape)):
                    raise UserError(f"checkpoint: {self.path} has {name} {numbers.shape} instead of {shape}.")
                inside = places_of_numbers > 0
                whole[places_of_numbers[inside] - 1] = part.change.undo(torch.from_numpy(numbers))[inside]
            return whole.view(table.shapes[public]).to(specs[public].dtype)

        return ComputedWeights(specs, read, {public: [name for _, name in parts] for public, parts in places.items()})

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor before it was written; that of quantised numbers is fp32."""
        kind = self._stored[name].tensor_type.name.lower()
        kinds = (each for each in DTYPES if each == kind or name in self._fields.get(f"zoo.{each}", []))
        return DTYPES.get(next(kinds, ""), torch.float32)

    def _numbers(self, name: str) -> Any:
        """Return a tensor in fp32, as an array."""
        tensor = self._stored[name]
        return np.array(library("checkpoint").quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _numbered(part: Stored, public: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Return where each number of a stored tensor is in a public one, counted from 1; 0 for those of other tensors."""
    own = torch.arange(1, math.prod(shapes[public]) + 1).view(shapes[public])
    return part.order(*(own if name == public else torch.zeros_like(own).view(shapes[name]) for name in part.sources))


def _equal(value: Any, expected: Any) -> bool:
    numbers = isinstance(expected, float) and isinstance(value, float)
    return math.isclose(value, expected, rel_tol=_SAME) if numbers else value == expected
