"""`SavedModel`: one way to open what was saved; `load` and `load_tokenizer`."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jsonargparse import Namespace

from kernels import UserError
from mixers import did_you_mean
from zoo.checkpoints.format import KEY, check_weights, load_tensors, read_hashed_checkpoint, weights_in
from zoo.checkpoints.signature import is_own
from zoo.checkpoints.sources import class_paths, sources
from zoo.checkpoints.tensor_files import TensorFiles, TensorsInMemory, Weights, has_tensor_files
from zoo.checkpoints.zero_shards import SHARDS
from zoo.config.build import from_config
from zoo.config.imports import import_object
from zoo.config.parser import parse_model
from zoo.data.text.tokenizer import Tokenizer
from zoo.files.hashing import combined, file_digest
from zoo.files.links import check_inside
from zoo.files.safe_yaml import decode_yaml
from zoo.generation.generate import write
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.saved.exported_folder import CONFIG, TOKENIZER, ExportedFiles
from zoo.saved.gguf.read import GgufFile
from zoo.saved.hub import ON_HUB, downloaded
from zoo.saved.public.folder import CONFIG as PUBLIC_CONFIG
from zoo.saved.public.folder import PublicFolder
from zoo.saved.public.import_export import Imported, imported
from zoo.saved.public.rwkv_file import RwkvFile
from zoo.saved.public.tokenizer import read_tokenizer
from zoo.saved.trust import vet_model
from zoo.train.devices import check_device

log = logging.getLogger(__name__)

_PUBLIC_FILES: Mapping[str, type[PublicFolder]] = {".gguf": GgufFile, ".pth": RwkvFile}


class SavedModel(ABC):
    """A model that was saved. Nothing is read before it is needed, and each file is read and hashed once.

    `SavedModel.open(path)` takes a run's folder, a .ckpt file (also of a sharded checkpoint), an exported folder, a
    public folder or file in one of the layouts that `convert` reads, or such a folder on the Hub, hf://owner/name. All
    properties raise a UserError if the model does not exist, is damaged or is of another format.

    Attributes:
        path: Where the model was opened.
        trust: Whether its config may name any class, even if someone else saved it.
        ignore: Keys of a public config.json that are left out.
        is_public: Whether it is in a public layout.
    """

    is_public: ClassVar[bool] = False

    def __init__(self, path: str | Path, trust: bool = False, ignore: Collection[str] = ()):
        self.path, self.trust, self.ignore = Path(path), trust, ignore

    @staticmethod
    def open(path: str | Path, trust: bool = False, ignore: Collection[str] = ()) -> "SavedModel":
        """Return the saved model at a path, of the kind that is there; one on the Hub is downloaded.

        `ignore` names keys of a public config.json that are left out.
        """
        if str(path).startswith(ON_HUB):
            path = downloaded(path)
        path = Path(path)
        if _public_kind(path) is not None:
            return _Public(path, trust, ignore)
        if ignore:
            raise UserError(f"ignore: {path} is not a public checkpoint, so it has no config.json.")
        return _Exported(path, trust) if has_tensor_files(path) else Checkpoint(path, trust)

    @property
    @abstractmethod
    def source(self) -> Path:
        """The file with the config, which error messages name."""

    @property
    def public_config(self) -> dict[str, Any]:
        """The contents of a public config.json; empty for other models."""
        return {}

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The config of its run, with the entry `model`; not vetted yet."""

    @property
    def signature(self) -> Any:
        """The signature of the config; None if it has none."""
        return None

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The weights, in the dtypes that they were saved in; those of safetensors are read one at a time."""

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files with the weights."""

    @cached_property
    def identity(self) -> str:
        """The hash of `files`, for records of what was measured."""
        return combined([self._digest(file) for file in self.files])

    def _digest(self, file: Path) -> str:
        return file_digest(file)

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None if it was saved without one."""

    @property
    def required_tokenizer(self) -> Tokenizer:
        """Its tokenizer; a UserError if it was saved without one."""
        if (tokenizer := self.tokenizer) is None:
            raise UserError(
                f"checkpoint: {self.path} was saved without a tokenizer, so it cannot process text; "
                "zoo.load gives the model"
            )
        return tokenizer

    @cached_property
    def is_trusted(self) -> bool:
        """Return whether the config may name any class: the user trusts or has signed it."""
        return self.trust or is_own(self.config, self.signature)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """The key `model` of the config, vetted unless it is trusted."""
        model = self.config["model"]
        if not self.is_trusted:
            vet_model(model, self.source)
        return model

    @cached_property
    def parsed(self) -> Namespace:
        """The parsed `model_config`; only to be read."""
        with self._named():
            return parse_model({"model": self.model_config})

    def load(self, device: torch.device | str = "cpu") -> LanguageModel:
        """The trained model, in evaluation mode; a UserError as for `on_meta`, or if the device is invalid."""
        check_device(device)
        # the weights are compared with the config before memory is taken for it
        _, weights = self._described(self.parsed)
        model = self._built(self.parsed)
        load_tensors(model, weights, self._weights_path)
        return model.to(device).eval()

    def on_meta(self) -> tuple[LanguageModel, Weights]:
        """The model without memory for its weights, and its weights by the names of its state dict.

        A UserError if it is not trusted, or the weights are damaged or of another model.
        """
        return self._described(self.parsed)

    def _described(self, config: Namespace) -> tuple[LanguageModel, Weights]:
        """The model of a parsed config on the meta device, and its weights by the names of its state dict."""
        weights = self.weights
        with self._named():
            model = self._built(config, "meta")
        check_weights(weights.specs, model, self._weights_path)
        if weights.specs.keys() == model.state_dict().keys():
            return model, weights
        named = {name: weights.tensor(name) for name in weights.specs}  # by the names of fused parameters
        filled = self._built(config, "meta")
        filled.load_state_dict(named, assign=True)
        return model, TensorsInMemory(filled.state_dict())

    def _built(self, config: Namespace, device: str | None = None) -> LanguageModel:
        """The model of the parsed config, with fresh weights, or without memory for them on the device meta."""
        config = config.clone()
        config.model.nominal_size = None  # a difference was logged when it was trained
        built = from_config(config, device)
        built.config = {"model": self.config["model"]}
        return built

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn what a constructor raises for an impossible value in the config into a UserError."""
        try:
            yield
        except UserError:  # which is a ValueError
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
            message = " ".join(str(error).split())
            raise UserError(f"checkpoint: {self.source}: its model cannot be built: {message}") from error

    @property
    def _weights_path(self) -> Path:
        """The place of the weights, for messages."""
        return self.files[0] if len(self.files) == 1 else self.source.parent

    def _check_config(self, config: Any) -> dict[str, Any]:
        if not isinstance(config, dict) or "model" not in config:
            raise UserError(f"checkpoint: {self.source} has no config of a model")
        return config

    def _tokenizer_file(self, files: ExportedFiles) -> Tokenizer:
        file = self.path / TOKENIZER
        try:
            text = files.read(TOKENIZER).decode()
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"checkpoint: {file} cannot be read as text: {error}") from None
        return Tokenizer.from_json(text, f"checkpoint: the tokenizer of {file}")


class Checkpoint(SavedModel):
    """A .ckpt file, or the last one of a run's folder."""

    @cached_property
    def source(self) -> Path:
        return checkpoint_of(self.path)

    @property
    def step(self) -> int:
        """Optimiser steps before it was saved."""
        return int(self._contents[0].get("global_step", 0))

    @property
    def files(self) -> list[Path]:
        return [self.source]

    @cached_property
    def _contents(self) -> tuple[dict[str, Any], str]:
        """Parts of the checkpoint, without the states of optimisers; and the hash of the file."""
        checkpoint, digest = read_hashed_checkpoint(self.source)
        if checkpoint[KEY]["config"] is None:
            raise UserError(
                f"checkpoint: {self.source} holds no config to build its model from, as that was not made by "
                "zoo.build or zoo.load"
            )
        return {key: checkpoint[key] for key in (KEY, SHARDS, "state_dict", "global_step") if key in checkpoint}, digest

    def _digest(self, file: Path) -> str:
        return self._contents[1]

    @cached_property
    def model_config(self) -> dict[str, Any]:
        self.warn_of_changed_sources(self.config["model"])
        return super().model_config

    def warn_of_changed_sources(self, config: dict[str, Any]) -> None:
        """Warn of classes in a trusted config whose files are not those that the run was trained with."""
        trained_with = self._contents[0][KEY].get("sources")
        if not self.is_trusted or not isinstance(trained_with, dict):
            return
        for path in class_paths(config):
            with suppress(Exception):  # whatever is wrong with it is said when it is built
                import_object(path)
        for path, source in sources(config).items():
            if (before := trained_with.get(path)) not in (None, source.hash):
                copy = self.source.parents[1] / source.copy_name(str(before))
                hint = f"; {copy} is a copy of the file as it was" if copy.is_file() else ""
                log.warning("checkpoint: %s has changed since %s was saved%s", source.file, self.source, hint)

    @cached_property
    def config(self) -> dict[str, Any]:
        config = self._contents[0][KEY]["config"]
        if self.path.is_dir() and not is_own(config, self.signature):
            check_inside(self.source, self.path)
        return self._check_config(config)

    @property
    def signature(self) -> Any:
        return self._contents[0][KEY].get("signature")

    @cached_property
    def weights(self) -> Weights:
        return TensorsInMemory(weights_in(self._contents[0], self.source))

    @property
    def tokenizer_json(self) -> str | None:
        """The tokenizer as it was saved; None without one."""
        return self._contents[0][KEY]["tokenizer"]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        if (self.path / TOKENIZER).is_file():
            return self._tokenizer_file(ExportedFiles(self.path))
        if (text := self.tokenizer_json) is None:
            return None
        return Tokenizer.from_json(text, f"checkpoint: the tokenizer of {self.source}")


class _Exported(SavedModel):
    """A folder that `export` or `convert` wrote."""

    @cached_property
    def _files(self) -> ExportedFiles:
        return ExportedFiles(self.path)

    def _digest(self, file: Path) -> str:
        return self._files.digest(file)

    @property
    def source(self) -> Path:
        return self.path / CONFIG

    @cached_property
    def config(self) -> dict[str, Any]:
        self._files.check()
        if not self.source.is_file():
            raise UserError(f"checkpoint: {self.source} is missing, or config.json if it is a public checkpoint")
        try:
            data = self._files.read(CONFIG)
        except OSError as error:
            raise UserError(f"checkpoint: {self.source} cannot be read as text: {error}") from None
        return self._check_config(decode_yaml(data, f"checkpoint: {self.source}"))

    @property
    def signature(self) -> Any:
        return self._files.signature

    @cached_property
    def weights(self) -> TensorFiles:
        self._files.check()
        return TensorFiles(self.path)

    @property
    def files(self) -> list[Path]:
        return self.weights.files

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer_file(self._files) if (self.path / TOKENIZER).is_file() else None


class _Public(SavedModel):
    """A folder of Hugging Face or flash-linear-attention, a file of RWKV's author, or a GGUF file."""

    is_public = True

    @cached_property
    def _folder(self) -> PublicFolder:
        kind = _public_kind(self.path)
        assert kind is not None
        return kind(self.path)

    @cached_property
    def _imported(self) -> Imported:
        return imported(self._folder, self.ignore)

    @property
    def source(self) -> Path:
        return self._folder.config_file

    @property
    def public_config(self) -> dict[str, Any]:
        return self._folder.config()

    @cached_property
    def config(self) -> dict[str, Any]:
        return {"model": self._imported.model}

    @property
    def weights(self) -> Weights:
        return self._imported.weights

    @property
    def files(self) -> list[Path]:
        return self._folder.files

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return read_tokenizer(self._folder)


def _public_kind(path: Path) -> type[PublicFolder] | None:
    """The class that reads what is at a path, if it is in a public layout; None for what this project has written."""
    if path.is_file():
        return _PUBLIC_FILES.get(path.suffix)
    return PublicFolder if (path / PUBLIC_CONFIG).is_file() and not (path / CONFIG).exists() else None


def load(path: str | Path, device: torch.device | str | None = None, trust: bool = False) -> LanguageModel:
    """Load the trained model of a checkpoint, a run's folder, an exported or a public folder, in evaluation mode.

    Args:
        path: A `.ckpt` file, a folder of a run, a folder that `export` or `convert` wrote, or a folder of Hugging Face
            or flash-linear-attention in a layout that `convert` reads, a `.gguf` file, or a `.pth` file of RWKV-7; or
            `hf://owner/name[@revision]`, such a folder on the Hub, of which config, tokenizer and weights are
            downloaded.
        device: Device of the model; None is the CPU.
        trust: Whether to import and call whatever classes its config names. Otherwise a model that someone else saved
            may only use components of this project, and mixers that you or an installed plug-in registered.

    Raises:
        UserError: The model does not exist, is damaged, not trusted, or of another format; or the device is invalid.
    """
    saved = SavedModel.open(path, trust)
    model = saved.load(device or "cpu")
    with suppress(UserError):  # a damaged tokenizer, which only `generate` needs
        if (tokenizer := saved.tokenizer) is not None:
            model.writer = partial(write, tokenizer=tokenizer, graphs=DecodingGraphs())
    return model


def load_tokenizer(path: str | Path, trust: bool = False) -> Tokenizer:
    """Load the tokenizer of a saved model.

    Args:
        path: As for `load`.
        trust: Whether to use it even if it may take much time or memory.

    Raises:
        UserError: The tokenizer is missing or damaged.
    """
    return SavedModel.open(path, trust).required_tokenizer


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint file that `path` refers to: the file itself, or the last checkpoint of a run's folder."""
    path = Path(path)
    if path.suffix in (".yaml", ".yml") and not path.is_dir():
        raise UserError(
            f"checkpoint: {path} is a config, not a trained model; train it by python cli.py fit --config {path}, and "
            "name the folder of that run"
        )
    if path.is_file():
        return path
    if "," in str(path) and not path.exists():
        raise UserError(f"checkpoint: there is nothing at {path}; several are written --checkpoint A --checkpoint B")
    if path.is_dir():
        for file in (path / "checkpoints" / "last.ckpt", path / "last.ckpt"):
            if file.is_file():
                return file
        advice = (
            "; exported and converted weights have no data: evaluate --tasks=perplexity"
            if (path / "config.json").is_file()
            else ""
        )
        raise UserError(f"checkpoint: the folder {path} holds no checkpoints/last.ckpt{advice}")
    run = Path("runs") / path
    neighbours = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = f"; did you mean {run}?" if run.exists() else did_you_mean(path.name, neighbours)
    raise UserError(f"checkpoint: there is nothing at {path}{hint}")
