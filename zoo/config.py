"""Configs: found by name, parsed against the constructors' own signatures, and built.

Four keys make a run: `model` is LanguageModel's constructor, `optim` the optimiser and its schedule, `data` a data
module, `trainer` Lightning's; smaller ones say what a run leaves behind, and what ends it. Files and overrides merge
in order.
"""

import copy
import dataclasses
import inspect
import json
import logging
import pydoc
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

import mixers
from kernels import UserError
from mixers import did_you_mean

from .callbacks import Samples
from .curves import LossCurve
from .data import TextData
from .explain import explain
from .guard import LossGuard
from .model import LanguageModel
from .optim import Optimisation
from .plain import parse_yaml, read_yaml
from .profile import Profile
from .saving import Checkpoints
from .state_norms import StateNorms
from .watchdog import Watchdog

log = logging.getLogger(__name__)

CLASSES = {
    "model": LanguageModel,
    "optim": Optimisation,
    "trainer": L.Trainer,
    "checkpoints": Checkpoints,
    "samples": Samples,
    "loss_curve": LossCurve,
    "guard": LossGuard,
    "watchdog": Watchdog,
    "state_norms": StateNorms,
    "profile": Profile,
}
KEYS = ("seed_everything", "compile", "activation_checkpointing", "context_parallel", "data", *CLASSES)
RENAMED = {"sequence_parallel": "context_parallel"}  # old keys that are still read, as saved configs have them

_PACKAGE = Path(__file__).parent
# beside the package in a checkout, inside it in a wheel
CONFIGS = next(folder for folder in (_PACKAGE.parent / "configs", _PACKAGE / "configs") if folder.is_dir())


def find_config(name: str | Path) -> Path:
    """The file of a config: a path that exists, or a name in `configs/`, with or without `.yaml`.

    Raises:
        UserError: There is no such file; names a similar one if there is.
    """
    for candidate in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))
    raise UserError(f"config: {str(name)!r} is neither a file nor one of configs/{did_you_mean(str(name), known)}")


class ConfigFile(ActionConfigFile):
    """--config with bare names, and without the defaults of one data class for another."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        contents: Any = None
        if isinstance(values, str) and values.startswith("{"):
            contents = parse_yaml(values, "config")
        elif isinstance(values, str):
            values = str(find_config(values))
            contents = read_yaml(values)
            if not isinstance(contents, dict):
                raise UserError(f"config: {values} holds no keys such as model, data or trainer")
        if contents is not None and not contents.keys().isdisjoint(RENAMED):
            contents = renamed(contents)
            values = json.dumps(contents)
        if contents is not None and (named := _class_name(contents.get("data"))) is not None:
            _leave_defaults_behind(cfg.get("data"), named)
        super().__call__(parser, cfg, values, option_string)


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys of today; a line is logged for each that has another name now."""
    for old in config.keys() & RENAMED.keys():
        log.warning("%s is deprecated: it is called %s now", old, RENAMED[old])
    return {RENAMED.get(key, key): value for key, value in config.items()}


def _class_name(spec: Any) -> str | None:
    """The class that a config's `data` names, if it names one."""
    return spec if isinstance(spec, str) else spec.get("class_path") if isinstance(spec, dict) else None


def _leave_defaults_behind(before: Any, named: str) -> None:
    """Take the defaults of the data class so far out of its arguments, as another class may have other ones.

    The parser hands every argument that the new class knows on to it, and does not tell defaults from what was set.
    """
    arguments = None if before is None else before.get("init_args")
    if not arguments or before.class_path.rpartition(".")[2] == named.rpartition(".")[2]:
        return
    known = inspect.signature(pydoc.locate(before.class_path)).parameters  # type: ignore[arg-type]
    for name, value in list(vars(arguments).items()):
        if name in known and value == known[name].default:
            del arguments[name]
    if kept := ", ".join(f"{name}={value}" for name, value in vars(arguments).items()):
        log.info("data: %s in place of %s keeps what was set before: %s", named, before.class_path, kept)


class Parser(LightningArgumentParser):
    """A parser that raises instead of ending the process."""

    def __init__(self, **settings: Any):
        super().__init__(**{"dump_header": None, "exit_on_error": False, "allow_abbrev": False, **settings})

    def options(self) -> list[str]:
        """The names of all options, without dashes."""
        return [o[2:] for action in self._actions for o in action.option_strings if o.startswith("--")]


def _said(error: BaseException | None) -> UserError | None:
    """What one of our own constructors said, out of the parser's wrappings; it stands as it is."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


@contextmanager
def explained(parser: Parser) -> Iterator[None]:
    """Turn what `parser` raises for a mistake in a config into a UserError of one sentence."""
    try:
        yield
    except ArgumentError as error:
        if said := _said(error):
            raise said from None
        raise UserError(explain(str(error), parser.options())) from None


def add_arguments(parser: LightningArgumentParser) -> None:
    """The keys of a run, the same for every verb."""
    mixers.names()  # plug-ins register before anything is parsed
    parser.add_argument(
        "--compile",
        type=bool,
        default=False,
        help="Compile the blocks for the steps of training; needs a C++ compiler.",
    )
    parser.add_argument(
        "--activation_checkpointing",
        type=int | None,
        help="Recompute every N-th block in the backward pass, to save memory; 1 for all blocks.",
    )
    parser.add_argument(
        "--context_parallel",
        type=int,
        default=1,
        help="How many neighbouring processes share each sequence, a part each; needs trainer.strategy=ddp.",
    )
    parser.add_class_arguments(LanguageModel, "model", fail_untyped=False)
    parser.add_class_arguments(Optimisation, "optim")
    parser.add_lightning_class_args(L.LightningDataModule, "data", subclass_mode=True, required=True)
    parser.add_lightning_class_args(L.Trainer, "trainer")
    parser.add_lightning_class_args(Checkpoints, "checkpoints")
    parser.add_lightning_class_args(Samples, "samples")
    parser.add_lightning_class_args(LossCurve, "loss_curve")
    parser.add_lightning_class_args(LossGuard, "guard")
    parser.add_lightning_class_args(Watchdog, "watchdog")
    parser.add_lightning_class_args(StateNorms, "state_norms")
    parser.add_lightning_class_args(Profile, "profile")
    parser.set_defaults(
        {
            "data": {"class_path": f"{TextData.__module__}.{TextData.__qualname__}"},
            "trainer.max_epochs": -1,  # a run is counted in steps
            "trainer.check_val_every_n_epoch": None,
            "trainer.use_distributed_sampler": False,  # the loaders know their rank
            "trainer.log_every_n_steps": 10,
        }
    )


def read(*configs_and_overrides: str | Path) -> Namespace:
    """Parse configs and `key=value` overrides, in order, without building anything.

    Raises:
        UserError: A file is missing, or a key or value is wrong.
    """
    parser = _parser()
    parser.add_argument("-c", "--config", action=ConfigFile)
    arguments = []
    for item in map(str, configs_and_overrides):
        arguments += [f"--{item.lstrip('-')}"] if "=" in item and not item.startswith("{") else ["--config", item]
    with explained(parser):
        return parser.parse_args(as_overlays(arguments))


def as_overlays(arguments: list[str]) -> list[str]:
    """Options that the parser would misread, as inline overlays.

    Deep in a component it would take the null of `--model.a.b=null` for a class name; and `--data=NAME` would get the
    defaults of the class before (see `ConfigFile`).
    """
    done: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--data" and (name := next(rest, None)) is not None:
            argument = f"--data={name}"
        key, given, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and key in RENAMED:
            ((key, _),) = renamed({key: value}).items()
            argument = f"--{key}{given}{value}"
        if (argument.startswith("--model.") and value == "null") or (
            argument.startswith("--data=") and "{" not in value
        ):
            overlay: Any = None if value == "null" else {"class_path": value}
            for part in reversed(key.split(".")):
                overlay = {part: overlay}
            done += ["--config", json.dumps(overlay)]
        else:
            done.append(argument)
    return done


def _parser() -> Parser:
    """The parser of a run outside the command line."""
    parser = Parser()
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    add_arguments(parser)
    return parser


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
        if said := _said(error):
            raise said from None
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


def to_dict(config: Namespace) -> dict[str, Any]:
    """A parsed config as plain containers, from which `parse` makes it again.

    Raises:
        UserError: A value, such as the default of somebody's class, cannot be written as YAML and read back.
    """
    plain = _dumped(config)
    if (bad := next(_unwritable(plain), None)) is not None:
        raise UserError(f"{bad}; give it in the config as plain values: numbers, texts, lists and mappings")
    again = _dumped(parse(copy.deepcopy(plain)))  # the parser changes what it is given
    for key, before, now in differences(plain, again):
        raise UserError(f"{key}: {before!r} is read back from config.yaml as {now!r}; give it as plain values")
    return plain


def _dumped(config: Namespace) -> dict[str, Any]:
    known = Namespace({key: _without_instances(config[key]) for key in vars(config) if key in KEYS})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="\\s*Unable to serialize instance")  # `to_dict` says it
        return yaml.safe_load(_parser().dump(known, skip_none=False, skip_validation=True))


def _without_instances(value: Any) -> Any:
    """Dataclass instances, as in the defaults of constructors, as their fields; the parser writes only some of them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _without_instances(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Namespace):
        return Namespace({key: _without_instances(item) for key, item in vars(value).items()})
    if isinstance(value, dict):
        return {key: _without_instances(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_instances(item) for item in value]
    return value


def _unwritable(plain: Any, key: str = "") -> Iterator[str]:
    """Where the parser wrote a remark instead of a value."""
    if isinstance(plain, dict | list):
        for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from _unwritable(value, f"{key}.{name}".lstrip("."))
    elif isinstance(plain, str) and plain.startswith("Unable to serialize instance "):
        value = plain.removeprefix("Unable to serialize instance ")
        yield f"{key.replace('init_args.', '')}: {value} is no plain value"


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys at which two plain configs differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def parse(config: dict[str, Any]) -> Namespace:
    """A config out of a checkpoint, parsed."""
    parser = _parser()
    with explained(parser):
        return parser.parse_object(config)


def write(config: Namespace, path: Path) -> None:
    """Write a parsed config as YAML."""
    text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    path.write_text(
        "# Everything that this run was made of; fit --config takes it as it is.\n" + text, encoding="utf-8"
    )
