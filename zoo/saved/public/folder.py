"""A folder of Hugging Face's: config.json, weights as safetensors or `pytorch_model.bin`, tokenizer. Nothing is run."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.checkpoints.pickled import PickledTensors, has_pickles
from zoo.checkpoints.tensor_files import INDEX, TensorFiles, Weights, has_tensor_files
from zoo.files.links import check_inside
from zoo.files.safe_yaml import check_plain

CONFIG = "config.json"


class PublicFolder:
    """The files of a public folder, each read once and never through a link that leaves the folder."""

    def __init__(self, path: Path):
        self.path, self.config_file = path, path if path.is_file() else path / CONFIG
        self._configs: dict[str, dict[str, Any]] = {}

    def config(self, name: str = CONFIG) -> dict[str, Any]:
        """The contents of a JSON file; a UserError if it is missing or not a JSON object."""
        if name not in self._configs:
            file = self.path / name
            check_inside(file, self.path)
            try:
                contents = json.loads(file.read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                message = " ".join(str(error).split())
                raise UserError(f"checkpoint: {file} cannot be read as JSON: {message}.") from None
            if not isinstance(contents, dict):
                raise UserError(f"checkpoint: {file} holds no JSON object.")
            check_plain(contents, f"checkpoint: {file}")
            self._configs[name] = contents
        return self._configs[name]

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        return (self.path / name).is_file()

    @cached_property
    def weights(self) -> Weights:
        """The weights; a UserError if they are missing or damaged, or in other pickles than `pytorch_model.bin`."""
        if has_tensor_files(self.path):
            for file in [*self.path.glob("*.safetensors"), self.path / INDEX]:
                check_inside(file, self.path)
            return TensorFiles(self.path)
        if has_pickles(self.path):
            return PickledTensors(self.path)
        raise UserError(f"checkpoint: {self.path} has no weights: neither safetensors nor pytorch_model.bin is in it.")

    @property
    def files(self) -> list[Path]:
        """The files with the weights."""
        return self.weights.files if isinstance(self.weights, TensorFiles | PickledTensors) else [self.path]

    def text(self, name: str) -> str:
        """The contents of a text file."""
        file = self.path / name
        check_inside(file, self.path)
        try:
            return file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"checkpoint: {file} cannot be read as text ({error}).") from None
