"""Loading saved models and their tokenizers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace

from kernels import UserError
from mixers import did_you_mean
from zoo.checkpoints.format import KEY, check_weights, load_tensors, read_checkpoint, read_weights
from zoo.checkpoints.signature import is_own
from zoo.checkpoints.sizes import check_sizes
from zoo.checkpoints.tensor_files import TensorFiles, TensorsInMemory, Weights, has_tensor_files
from zoo.config.build import from_config
from zoo.config.moved import with_current_paths
from zoo.config.parser import parse_model
from zoo.config.serialise import to_dict
from zoo.config.trust import vet_model
from zoo.conversion.convert import imported
from zoo.conversion.folder import CONFIG, is_public
from zoo.conversion.tokenizer import read_tokenizer
from zoo.data.text.tokenizer import Tokenizer
from zoo.files.links import check_inside
from zoo.files.safe_yaml import read_yaml
from zoo.lm.model import LanguageModel
from zoo.loading.hashes import check_hashes


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint file that `path` refers to: the file itself, or the last checkpoint of a run's folder.

    Raises:
        UserError: The path holds no checkpoint.
    """
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        for candidate in (path / "checkpoints" / "last.ckpt", path / "last.ckpt"):
            if candidate.is_file():
                return candidate
        raise UserError(f"checkpoint: the folder {path} holds no checkpoints/last.ckpt")
    run = Path("runs") / path
    neighbours = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = f"; did you mean {run}?" if run.exists() else did_you_mean(path.name, neighbours)
    raise UserError(f"checkpoint: there is nothing at {path}{hint}")


class Saved(NamedTuple):
    """A saved model, before its weights are read.

    Attributes:
        files: The files with the weights.
        source: The file with the config, which error messages name.
        config: The config of its run.
        signature: The signature of the config; None if it has none.
        weights: The weights, to be read one at a time; None in a checkpoint.
    """

    files: list[Path]
    source: Path
    config: dict[str, Any]
    signature: Any
    weights: Weights | None = None


def find(path: str | Path) -> Saved:
    """Find a saved model and read its config.

    Args:
        path: As for `load`.

    Raises:
        UserError: The model does not exist, or is damaged.
    """
    folder, weights = Path(path), None
    if is_public(folder):
        public = imported(folder)
        return Saved(public.files, folder / CONFIG, {"model": public.model}, None, public.weights)
    if has_tensor_files(folder):
        source, signature = folder / "config.yaml", check_hashes(folder)
        if not source.is_file():
            raise UserError(f"checkpoint: {source} is missing, or config.json if it is a public checkpoint")
        config, weights = read_yaml(source, "checkpoint"), TensorFiles(folder)
        files = weights.files
    else:
        source = checkpoint_of(path)
        contents, files = saved(source), [source]
        config, signature = contents["config"], contents.get("signature")
        if folder.is_dir() and not is_own(config, signature):
            check_inside(source, folder)
    if not isinstance(config, dict) or "model" not in config:
        raise UserError(f"checkpoint: {source} has no config of a model")
    return Saved(files, source, config, signature, weights)


def load(path: str | Path, device: torch.device | str | None = None, trust: bool = False) -> LanguageModel:
    """Load the trained model of a checkpoint, a run's folder, an exported or a public folder, in evaluation mode.

    Args:
        path: A `.ckpt` file, a folder of a run, a folder that `export` or `convert` wrote, or a folder of Hugging Face
            or flash-linear-attention in one of the layouts that `convert` reads.
        device: Device of the model; None is the CPU.
        trust: Whether to import and call whatever classes its config names. Otherwise a model that someone else saved
            may only use components of this project, and mixers that you or an installed plug-in registered.

    Raises:
        UserError: The model does not exist, is damaged, not trusted, or of another format; or the device is invalid.
    """
    _check_device(device or "cpu")
    saved = find(path)
    model_config(saved, trust)
    # the weights are compared with the config before memory is taken for it
    config, _, weights = _described(saved, trust or is_own(saved.config, saved.signature))
    model = _built(saved, config)
    load_tensors(model, weights, _weights_of(saved))
    return model.to(device or "cpu").eval()


def model_config(saved: Saved, trust: bool) -> dict[str, Any]:
    """The key `model` of a saved config.

    Raises:
        UserError: It is not trusted.
    """
    model = with_current_paths(saved.config["model"])
    if not (trust or is_own(saved.config, saved.signature)):
        vet_model(model, saved.source)
    return model


def build_described(saved: Saved, trust: bool) -> tuple[LanguageModel, Weights]:
    """The model of a saved config on the meta device, and its weights by the names of its state dict.

    The weights have the dtypes that they were saved in; those of safetensors are read one at a time.

    Raises:
        UserError: It is not trusted, or of another format, or the weights are damaged or of another model.
    """
    model_config(saved, trust)
    return described(saved, trust or is_own(saved.config, saved.signature))


def described(saved: Saved, trust: bool) -> tuple[LanguageModel, Weights]:
    """As `build_described`, for a config that is vetted already; unless it is trusted, its sizes are bounded first.

    Raises:
        UserError: The weights are damaged or of another model.
    """
    return _described(saved, trust)[1:]


def _described(saved: Saved, trust: bool) -> tuple[Namespace, LanguageModel, Weights]:
    """The parsed config, and what `described` returns."""
    weights = saved.weights or TensorsInMemory(read_weights(saved.source))
    with _named(saved.source):
        config = parse_model({"model": saved.config["model"]})
    if not trust:
        check_sizes(to_dict(config)["model"], weights.specs, _weights_of(saved))
    with _named(saved.source):
        model = _built(saved, config, "meta")
    check_weights(weights.specs, model, _weights_of(saved))
    if weights.specs.keys() == model.state_dict().keys():
        return config, model, weights
    named = {name: weights.tensor(name) for name in weights.specs}  # by the names of fused parameters
    filled = _built(saved, config, "meta")
    filled.load_state_dict(named, assign=True)
    return config, model, TensorsInMemory(filled.state_dict())


def _built(saved: Saved, config: Namespace, device: str | None = None) -> LanguageModel:
    """The model of a parsed config, with fresh weights, or without memory for them on the device meta."""
    built = from_config(config, device)
    built.config = {"model": with_current_paths(saved.config["model"])}
    return built


@contextmanager
def _named(source: Path) -> Iterator[None]:
    """Turn what a constructor raises for an impossible value in the config of `source` into a UserError."""
    try:
        yield
    except UserError:  # which is a ValueError
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"checkpoint: {source}: its model cannot be built: {message}") from error


def _weights_of(saved: Saved) -> Path:
    """Return the place of the weights, for messages."""
    return saved.files[0] if len(saved.files) == 1 else saved.source.parent


def load_tokenizer(path: str | Path, trust: bool = False) -> Tokenizer:
    """Load the tokenizer of a saved model (see `load`).

    Args:
        path: As for `load`.
        trust: Whether to use it even if it may take much time or memory.

    Raises:
        UserError: The tokenizer is missing or damaged.
    """
    if (tokenizer := find_tokenizer(path, trust)) is None:
        raise UserError(
            f"checkpoint: {path} was saved without a tokenizer, so it cannot process text; zoo.load gives the model"
        )
    return tokenizer


def find_tokenizer(path: str | Path, trust: bool = False) -> Tokenizer | None:
    """The tokenizer of a saved model, or None if it has none.

    Args:
        path: As for `load`.
        trust: Whether to use it even if it may take much time or memory.

    Raises:
        UserError: The model does not exist, or the tokenizer is damaged.
    """
    folder = Path(path)
    if is_public(folder):
        return read_tokenizer(folder, trust)
    if (file := folder / "tokenizer.json").is_file():
        check_hashes(folder)
        text = _read_text(file)
    elif has_tensor_files(folder):
        return None
    else:
        file = checkpoint_of(path)
        text = saved(file)["tokenizer"]
        if text is None:
            return None
    return Tokenizer.from_json(text, f"checkpoint: the tokenizer of {file}", trust)


def saved(file: Path) -> dict[str, Any]:
    """The entry of a checkpoint that describes its run: `config`, `signature`, `tokenizer` …

    Raises:
        UserError: The file is not a checkpoint, is damaged, or has no config.
    """
    contents = read_checkpoint(file)[KEY]
    if contents["config"] is None:
        raise UserError(
            f"checkpoint: {file} holds no config to build its model from, as that was not made by zoo.build or zoo.load"
        )
    return contents


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"checkpoint: {file} cannot be read as text: {error}") from None


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # unknown, or not usable by this PyTorch
        raise UserError(f"device: {device} cannot be used here: {str(error).splitlines()[0]}") from None
