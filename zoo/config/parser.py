"""The parser of run configs, whose keys are the signatures of constructors.

Four keys define a run: `model` is LanguageModel's constructor, `optim` the optimiser and its schedule, `data` a data
module, `trainer` Lightning's Trainer; smaller ones configure the callbacks. Files and overrides merge in order.
"""

import functools
import inspect
import logging
import operator
import pydoc
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jsonargparse._core
import jsonargparse._subcommands
import jsonargparse._typehints
import torch
import yaml
from jsonargparse import (
    ActionConfigFile,
    ArgumentParser,
    Namespace,
    get_loader,
    register_unresolvable_import_paths,
    set_dumper,
    set_loader,
    set_parsing_settings,
)

import mixers
from kernels import BACKENDS, UserError
from kernels.core.scope import scope
from zoo.config.contradictions import check_overrides
from zoo.config.explain import Explainer, merged
from zoo.config.keys import GROUPS, OF_LIGHTNING
from zoo.config.overlays import Item, as_arguments, copied, load_config, load_items, without, without_null_groups
from zoo.files.safe_yaml import dump_quickly, dump_yaml
from zoo.lm.model import LanguageModel
from zoo.train.optim import Optimisation

log = logging.getLogger(__name__)

MAX_SEED = (1 << 32) - 1  # NumPy's, and so Lightning's

# as Lightning's command line does: names for what PyTorch writes in C, and configs of a trainer's parts behind URLs
register_unresolvable_import_paths(torch)
set_parsing_settings(config_read_mode_fsspec_enabled=True)

# Between steps, jsonargparse writes components to YAML and reads them again. Its dumper writes the text "1e5"
# without quotes, and its loader reads that as a number.
_MODE = "quoting_yaml"
UNSEEN = "quick_yaml"  # for text that is read back immediately and not kept
_LOAD = get_loader("yaml")
set_dumper(_MODE, dump_yaml)
set_dumper(UNSEEN, dump_quickly)


def _whole(value: Any) -> Any:
    """A value from YAML with 1e2 and 100.0 as 100, which keys for numbers of both kinds take.

    0.0 and 1.0 stay, since for keys that take both kinds, 1 is one batch and 1.0 is all of them.
    """
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    integral = isinstance(value, float) and 1 < abs(value) < 1 << 53 and value.is_integer()
    return int(value) if integral else value


def _loader(load: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = load(text)
        # `&x` and `#x` are null in YAML, and no one means that
        return text if value is None and text[:1] in ("&", "#") and "\n" not in text else _whole(value)

    return read


set_loader(_MODE, _loader(_LOAD), exceptions=(yaml.YAMLError,))
# single values are read without the loader (tried with jsonargparse 4.53, whose function this is)
jsonargparse._typehints.basic_json_or_yaml_load = _loader(jsonargparse._typehints.basic_json_or_yaml_load)
# Each component that may be null, or of one of two kinds, would be parsed twice, to see whether its defaults fit only
# the other kind. No component here fits two kinds.
jsonargparse._typehints.sub_defaults_invalidate_value = lambda *_: False


# The option of a key is searched thousands of times per config, each time among all options: half of the time
# (jsonargparse 4.53).
_search_option = jsonargparse._subcommands.find_action_and_subcommand


def _find_option(parser: Any, key: str, exclude: Any = None) -> Any:
    """As jsonargparse's function does, but look the key up where argparse looks options up.

    It returns None for no option, and searches groups that a config may set as a whole.
    """
    if not isinstance(parser, Parser):
        return _search_option(parser, key, exclude)
    option = parser._option_string_actions.get(f"--{key}")
    if option is None or (option.dest == key and isinstance(option, jsonargparse._typehints.ActionTypeHint)):
        return option, None
    return _search_option(parser, key, exclude)


jsonargparse._subcommands.find_action_and_subcommand = _find_option  # type: ignore[assignment]
jsonargparse._core.find_action_and_subcommand = _find_option  # type: ignore[assignment]


class ConfigFile(ActionConfigFile):
    """--config that finds configs by name, and does not pass on what was meant for another class.

    The parser would give a component that replaces another all arguments of the former that it knows, too. Parts of a
    model start from their own defaults; a data class keeps what was set for the former, such as its path, but no
    defaults.
    """

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        contents = {key: value for key, value in load_config(values).items() if key not in parser.skipped}
        if (named := _class_name(contents.get("data"))) is not None:
            _drop_defaults(cfg.get("data"), named)
        _start_over(cfg.get("model"), contents.get("model"))
        _, text = as_arguments([contents])
        super().__call__(parser, cfg, text, option_string)


def _class_name(spec: Any) -> str | None:
    """The class that a component's config names; None if it names none."""
    path = spec.get("class_path") if isinstance(spec, dict) else spec
    return path if isinstance(path, str) else None


def _drop_defaults(previous: Any, named: str) -> None:
    """Remove the previous data class's default values from its arguments, since the new class may have other defaults.

    The parser passes every argument that the new class knows on to it, without telling defaults from explicit values.
    """
    arguments = None if previous is None else previous.get("init_args")
    if not arguments or previous.class_path.rpartition(".")[2] == named.rpartition(".")[2]:
        return
    parameters = inspect.signature(pydoc.locate(previous.class_path)).parameters  # type: ignore[arg-type]
    for name, value in list(vars(arguments).items()):
        if name in parameters and value == parameters[name].default:
            del arguments[name]
    if kept := ", ".join(f"{name}={value}" for name, value in vars(arguments).items()):
        log.info("data: %s in place of %s keeps what was set before: %s", named, previous.class_path, kept)


def _start_over(previous: Any, new: Any) -> None:
    """Remove the arguments of parts of a model that a config replaces by parts of another class."""
    if not isinstance(previous, Namespace):
        return
    named, former = _class_name(new), previous.get("class_path")
    if named is not None and former is not None and named.rpartition(".")[2] != former.rpartition(".")[2]:
        previous.pop("init_args", None)
    elif isinstance(new, dict):
        for name, part in new.items():  # arguments may be next to `class_path`
            _start_over(previous.get(name, previous.get(f"init_args.{name}")), part)


class Parser(ArgumentParser):
    """A parser that raises instead of exiting, and quotes text that looks like a number.

    Args:
        skipped: Top-level keys that configs may have and that are left out.
        settings: As for the base class.
    """

    def __init__(self, skipped: Collection[str] = (), **settings: Any):
        defaults = {"dump_header": None, "exit_on_error": False, "allow_abbrev": False, "parser_mode": _MODE}
        super().__init__(**{**defaults, **settings})
        self.skipped = skipped

    def add_class_arguments(self, *arguments: Any, **settings: Any) -> Any:
        """As the base class does, but `int` is tried before `float` where an option takes both, and text after them.

        For Lightning, 1 is one batch and 1.0 is all batches. Its annotations say so, but `typing` gives
        `Optional[Union[int, float]]` the order in which any package first wrote an equal type. (Tried with jsonargparse
        4.53, whose `_typehint` this is.)
        """
        added = super().add_class_arguments(*arguments, **settings)
        for action in self._actions:
            types = get_args(getattr(action, "_typehint", None))
            if int in types and float in types:
                numbers_first = sorted(types, key=lambda kind: {int: 0, float: 1}.get(kind, 2))
                ordered = functools.reduce(operator.or_, numbers_first)
                action._typehint = ordered  # type: ignore[attr-defined]
        return added

    def parse_object(self, obj: Any, namespace: Namespace | None = None, **settings: Any) -> Any:
        """As the base class does, but parse the same part of a config only once inside `each_part_once`.

        The base class parses its own results repeatedly, on top of themselves. A result that has all defaults is only
        validated.
        """
        parsed = _PARSED.get()
        if parsed is None:
            return super().parse_object(obj, namespace, **settings)
        part, previous, context = (id(self), repr(obj)), repr(namespace), copy_context()
        # in the context, the base class passes on how strict to be, and the like
        key = (*part, previous, repr(settings), *map(id, context.values()))
        if key not in parsed.results:
            if part in parsed.complete:
                result = self._validated(obj)
            elif (*part, previous) in parsed.complete_from and "+" not in part[1]:  # a "+" would append twice
                result = self._validated(namespace)
            else:
                result = super().parse_object(obj, namespace, **settings)
            if settings.get("defaults", True):
                parsed.complete.add((id(self), repr(result)))
                parsed.complete_from.add((*part, repr(result)))
            parsed.results[key] = result, context  # kept, so that no id is reused
        return parsed.results[key][0].clone()

    def _validated(self, part: Any) -> Any:
        try:
            self.validate(part)
        except (TypeError, KeyError) as error:
            self.error(str(error), error)
        return part.clone()

    def dump(self, namespace: Namespace, format: str = "parser_mode", **settings: Any) -> str:
        """As the base class does, but faster for a component: the base class reads its text back immediately."""
        inside = format == "parser_mode" and getattr(self, "_inner_parser", False)
        return super().dump(namespace, UNSEEN if inside else format, **settings)

    def types(self) -> dict[str, Any]:
        """The types of all keys; None for those that are left out."""
        types = {action.dest: getattr(action, "_typehint", action.type) for action in self._actions}
        keys = {key: hint for key, hint in types.items() if hint is not None and not key.endswith(".help")}
        return keys | dict.fromkeys(self.skipped)


@dataclass
class _Parsed:
    """Parts parsed inside `each_part_once`, by the parser's id and the text of the part."""

    results: dict[tuple[Any, ...], tuple[Namespace, Context]] = field(default_factory=dict)
    complete: set[tuple[Any, ...]] = field(default_factory=set)  # results that have all defaults
    complete_from: set[tuple[Any, ...]] = field(default_factory=set)  # a part, and its complete result


_PARSED: ContextVar[_Parsed | None] = ContextVar("parsed", default=None)


@contextmanager
def each_part_once() -> Iterator[None]:
    """Remember the parts of configs that are parsed inside the block.

    At each level of a model the base class parses all parts below it several times. (It is not remembered for longer,
    since the meaning of a name depends on the classes that are imported.)
    """
    with scope(_PARSED, _Parsed()):
        yield


def cause_of(error: BaseException | None) -> UserError | None:
    """Return the UserError that the parser wrapped in its own exceptions; None if there is none.

    It comes from a constructor, or reports a slip in a Python file that a config names.
    """
    while error is not None and not isinstance(error, UserError | SyntaxError):
        error = error.__cause__
    if isinstance(error, SyntaxError):
        return UserError(f"{error.filename}, line {error.lineno}, is not Python ({error.msg})")
    return error


@contextmanager
def explained(parser: Parser, items: Iterable[str | Mapping[str, Any]] = ()) -> Iterator[None]:
    """Check the keys in `items`, and turn errors that `parser` raises for their values into a UserError.

    Items are configs and overrides `key=value`.
    """
    explainer = explainer_of(parser, items)
    explainer.check_keys()
    try:
        yield
    except (ArgumentError, SyntaxError) as error:
        if (cause := cause_of(error)) is not None:
            raise cause from None
        required_keys = [action.dest for action in parser._actions if action.required]
        sentence = explainer.mistake(_fits, required_keys)
        raise UserError(sentence or " ".join(str(error).split())) from None


def explainer_of(parser: Parser, items: Iterable[str | Mapping[str, Any]]) -> Explainer:
    """The explainer of configs and overrides that a parser is to read."""
    data = next((action.default for action in parser._actions if action.dest == "data"), None)
    return Explainer(parser.types(), merged([{"data": vars(data)} if isinstance(data, Namespace) else {}, *items]))


def _fits(hint: Any, value: Any) -> bool:
    """Return whether the parser takes a value for a type."""
    parser = Parser()
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_object({"value": value})
    except (ArgumentError, SyntaxError):
        return False
    return True


def add_arguments(parser: Parser) -> None:
    """Add the keys of a run, which are the same for every verb."""
    _add_keys_of_models(parser)
    _add_keys_of_lightning(parser)


def _add_keys_of_models(parser: Parser) -> None:
    """Add all keys but those of Lightning."""
    backend, every = (
        Literal[BACKENDS] | None,
        "Recompute every N-th block in the backward pass, to save memory; 1: all.",
    )
    invariant = "Whether a sequence has the same results in every batch; null for ZOO_DETERMINISTIC, or false."
    captured = (
        "Capture the training steps as CUDA graphs. Null: on a GPU, unless compile is true, context_parallel is above "
        "1, or a hook from outside this project is called within a step."
    )
    shared = "Number of neighbouring processes that share each sequence; requires trainer.strategy=ddp."
    for key, kind, default, purpose in (
        ("seed_everything", bool | int, 0, "Seed of all random numbers: true draws a seed, false sets none."),
        ("backend", backend, None, "Backend of the kernels in training; null for ZOO_BACKEND, or auto."),
        ("deterministic_kernels", bool | None, None, invariant),
        ("compile", bool, False, "Compile the blocks for the training steps; requires a C++ compiler."),
        ("cuda_graph", bool | None, None, captured),
        ("activation_checkpointing", int | None, None, every),
        ("context_parallel", int, 1, shared),
    ):
        parser.add_argument(f"--{key}", type=kind, default=default, help=purpose)
    parser.add_class_arguments(LanguageModel, "model", fail_untyped=False)
    parser.add_class_arguments(Optimisation, "optim")


def _add_keys_of_lightning(parser: Parser) -> None:
    """Add the keys whose classes derive from Lightning's."""
    import lightning as L  # takes three times as long as PyTorch, and a model is built without it

    from zoo.config.classes import CALLBACKS, CLASSES
    from zoo.data import TextData

    parser.add_subclass_arguments(L.LightningDataModule, "data", fail_untyped=False, required=True)
    settings = {"fail_untyped": False, "sub_configs": True}
    parser.add_class_arguments(CLASSES["trainer"], "trainer", instantiate=False, **settings)
    for key, callback in CALLBACKS.items():
        parser.add_class_arguments(callback, key, **settings)
    parser.set_defaults(
        {
            "data": {"class_path": f"{TextData.__module__}.{TextData.__qualname__}"},
            "trainer.max_epochs": -1,  # runs are counted in steps
            "trainer.check_val_every_n_epoch": None,
            "trainer.log_every_n_steps": 10,
        }
    )


def loaded(configs_and_overrides: Iterable[Item], skipped: Collection[str] = ()) -> list[str | Mapping[str, Any]]:
    """Load configs, and check overrides, for the parser.

    Args:
        configs_and_overrides: Configs and overrides.
        skipped: Top-level keys to leave out.

    Raises:
        UserError: A config is missing, is not a YAML mapping, or two overrides contradict each other.
    """
    items = without_null_groups(load_items(configs_and_overrides), GROUPS)
    check_overrides(item for item in items if isinstance(item, str))
    return without(items, skipped)


def read(*configs_and_overrides: Item) -> Namespace:
    """Parse configs and `key=value` overrides, in order, without building anything.

    Raises:
        UserError: A file is missing, or a key or value is wrong.
    """
    return _read(run_parser(files=True), configs_and_overrides)


def read_model(*configs_and_overrides: Item) -> Namespace:
    """As `read`, but without what a model does not depend on: `data`, `trainer` and the callbacks.

    These require Lightning, which takes longer to import than a model takes to be built. What they hold is not checked.
    """
    return _read(run_parser(lightning=False, files=True), configs_and_overrides)


def _read(parser: Parser, configs_and_overrides: Iterable[Item]) -> Namespace:
    items = loaded(configs_and_overrides, parser.skipped)
    mixers.names()  # plug-ins register before anything is parsed
    with explained(parser, items), each_part_once():
        config = parser.parse_args([*as_arguments(items)])
    seed = config.seed_everything
    if not isinstance(seed, bool) and not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed_everything: {seed} must be a number from 0 to {MAX_SEED}, true or false")
    return config


# Making a parser takes as long as reading a config with it, so each is made once. It looks classes up when a config
# names them, so mixers that register later are accepted. It does not notice a changed signature of a class in
# zoo/config/classes.py: `cache_clear()`.


@functools.cache
def run_parser(lightning: bool = True, files: bool = False) -> Parser:
    """The parser of a run's config. All callers share it: do not add to it.

    Args:
        lightning: Whether it knows the keys of Lightning; without, they are unknown, or left out of `files`.
        files: Whether it takes `--config`. (`parse` must not have it: a saved config would name files to read.)
    """
    parser = Parser(skipped=() if lightning or not files else OF_LIGHTNING)
    _add_keys_of_models(parser)
    if lightning:
        _add_keys_of_lightning(parser)
    if files:
        parser.add_argument("-c", "--config", action=ConfigFile)
    return parser


def parse(config: dict[str, Any]) -> Namespace:
    """Parse a config from a checkpoint or other plain containers.

    Raises:
        UserError: A key or value is wrong.
    """
    return _parse(run_parser(), config)


def parse_model(config: dict[str, Any]) -> Namespace:
    """As `parse`, for a config without `data`, `trainer` and the callbacks, and without their defaults.

    Raises:
        UserError: A key or value is wrong.
    """
    return _parse(run_parser(lightning=False), config)


def _parse(parser: Parser, config: dict[str, Any]) -> Namespace:
    mixers.names()  # plug-ins register before anything is parsed
    config = {key: value for key, value in copied(config).items() if not (value is None and key in GROUPS)}
    with explained(parser, [config]), each_part_once():
        return parser.parse_object(config)
