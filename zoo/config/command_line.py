"""Maps a command line to a function call: options are the function's parameters, the rest configs and overrides."""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser

from kernels import UserError
from zoo.arguments import check_not_empty
from zoo.config import signatures
from zoo.config.explain import unknown
from zoo.config.find import find_config
from zoo.config.help import class_help, purposes, short_help, topic_help, usage_line
from zoo.config.keys import OF_LIGHTNING
from zoo.config.merge import merged
from zoo.config.overlays import is_override, load_items
from zoo.config.parser import known_keys, read
from zoo.config.resolve import built_arguments, resolved
from zoo.config.serialise import to_dict
from zoo.config.suggest import is_certain
from zoo.files.safe_yaml import dump_yaml
from zoo.train.signals import PARENT

ANY_TEXT = ("stop",)  # lists of strings such as [/INST], which YAML would read as a list
MAY_BE_EMPTY = ("prompt", "stop")  # any text, which `generate` checks
# parameters of the functions that can only be passed from Python
IN_PYTHON: set[str | int] = {
    *("configs_and_overrides", "configs", "config"),
    *("callbacks", "stream", "tokenizer", "other", "others"),
}
PRINT_CONFIG = "--print_config"
NUMBERS = re.compile(r"[0-9.]+(,[0-9.]+)+")
PRINTING = ("-h", "--help", PRINT_CONFIG)  # options that print something and exit
LIGHTNINGS = {"ckpt_path": ("resume", "checkpoint")}  # Lightning's name of an option → what verbs call it


SKIP_DEFAULT = "skip_default"  # value of this option that leaves out what is the default anyway


class Keys(NamedTuple):
    """The config keys that a verb accepts.

    Attributes:
        names: The first parts of the keys.
        add: Adds the keys to a parser, for its help.
        parser: The class of this parser.
    """

    names: Collection[str]
    add: Callable[[ArgumentParser], Any]
    parser: type[ArgumentParser] = ArgumentParser


def arguments_of(
    function: Callable[..., Any],
    arguments: Sequence[str],
    verb: str,
    keys: Keys | None = None,
    positional: str | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """The arguments with which a command line calls a function. An option like --help prints and exits instead.

    Args:
        function: The function that the verb calls.
        arguments: The command line after the verb.
        verb: Name of the verb, for messages.
        keys: The config keys of the verb; None if it takes no configs.
        positional: The option set by a plain argument, or by all of them if it takes a list; "configs" if plain
            arguments are configs.

    Returns:
        Positional arguments (configs and overrides, in order), and keyword arguments.

    Raises:
        UserError: An option or its value is wrong.
    """
    signature = inspect.signature(function).parameters
    parameters = {name: parameter for name, parameter in signature.items() if name not in IN_PYTHON}
    flags = [name for name, parameter in parameters.items() if parameter.annotation is bool]
    options, items, plain = _split(arguments, flags, parameters)
    lists = [
        name
        for name, parameter in parameters.items()
        if list in [*map(get_origin, (parameter.annotation, *get_args(parameter.annotation)))]
    ]
    topic = None
    if keys is not None and plain and {"-h", "--help"} & {*options}:
        topic = plain.pop(0)
    if positional == "configs":
        items, plain = [*plain, *items], []
    elif positional is not None:
        taken = len(plain) if positional in lists else 1
        options += [f"--{positional}={value}" for value in plain[:taken]]
        plain = plain[taken:]
        option_names = {option.partition("=")[0] for option in options}
        if (
            parameters[positional].default is inspect.Parameter.empty
            and not {f"--{positional}", *PRINTING} & option_names
        ):
            raise UserError(f"{positional}: missing; name at least one: python cli.py {verb} {positional.upper()} …")
    if plain:
        raise UserError(_without_key(plain[0], parameters, keys))
    if {"-h", "--help"} & {*options} or any(item.partition("=")[0].endswith(".help") for item in items):
        _print_help(_help_parser(function, verb, positional, keys), verb, topic, keys, items)
    paths = [item.partition("=")[2] for item in items if item.startswith("--data.path=")]
    if len(paths) > 1 and not os.environ.get(PARENT):  # a sweep may override the path of its base
        raise UserError(f"data.path: is given twice; several paths are a list, --data.path=[{','.join(paths)}]")
    option_keys = {name: each for name, each in signatures.parameters(function).items() if name in parameters}
    _check_names(items, option_keys, keys)
    if PRINT_CONFIG in options:
        if keys is None:
            raise UserError(unknown(PRINT_CONFIG.removeprefix("--"), "", option_keys))
        sys.stdout.write(dump_yaml(to_dict(read(*items))))
        sys.exit(0)
    texts = [name for name, parameter in parameters.items() if parameter.annotation is str]
    values = _as_overrides(options, lists, texts)
    return items, built_arguments(function, resolved(merged(values), option_keys))


def printing(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without `--print_config`, and the value of that option: None if it is missing."""
    options = [each for each in arguments if each.partition("=")[0] == PRINT_CONFIG]
    value = options[-1].partition("=")[2] if options else None
    if value not in (None, "", SKIP_DEFAULT):
        raise UserError(f"print_config: {value!r} must be {SKIP_DEFAULT}, or left out")
    return [each for each in arguments if each not in options], value


def _help_parser(function: Callable[..., Any], verb: str, positional: str | None, keys: Keys | None) -> ArgumentParser:
    """A parser with the options of a verb, which writes its help."""
    parameters = {name: each for name, each in inspect.signature(function).parameters.items() if name not in IN_PYTHON}
    usage = usage_line(verb, parameters, positional, keys is not None)
    description = (inspect.getdoc(function) or "").partition("\n\n")[0]
    kind = ArgumentParser if keys is None else keys.parser
    parser = kind(prog=f"cli.py {verb}", usage=usage, description=description)
    if keys is not None:
        parser.add_argument("-c", "--config", help="A file, or a name in configs/; several overlay.")
    skipped: set[str | int] = {name for name in inspect.signature(function).parameters if name not in parameters}
    parser.add_function_arguments(function, as_positional=False, skip=skipped)
    return parser


def _check_names(items: Sequence[str], options: Collection[str], keys: Keys | None) -> None:
    """Raise a UserError about the first item that starts with neither a key nor an option."""
    allowed = () if keys is None else keys.names
    for item in items:
        key = item.lstrip("-").partition("=")[0] if is_override(item) else "config"
        if (key if keys is None else key.split(".")[0].rstrip("+")) in (*allowed, *(["config"] if keys else [])):
            continue
        if keys is None:
            raise UserError(unknown(key, "", options))
        name, names = key.rstrip("+"), {"config", *options, *keys.names}
        others = load_items(each for each in items if each != item)
        names |= known_keys(others, lightning=False)
        if not is_certain(name, "", names, OF_LIGHTNING):
            names |= known_keys(others)
        raise UserError(unknown(name, "", names))


def _without_key(argument: str, parameters: Collection[str], keys: Keys | None) -> str:
    """The sentence for an argument that belongs to no option."""
    if is_override(argument):
        return f"{argument!r}: options start with two dashes, --{argument}"
    names = [name for name in ("checkpoint", "config") if name in parameters or (name == "config" and keys)]
    advice = f"write --{names[0]} {argument}" if names else "options are written --key=value"
    return f"{argument!r}: an argument without a key; {advice}"


def _print_help(
    parser: ArgumentParser, verb: str, topic: str | None, keys: Keys | None, items: Sequence[str]
) -> NoReturn:
    of_class = next((item for item in items if item.partition("=")[0].endswith(".help")), None)
    if of_class is not None:
        key, _, name = of_class.lstrip("-").partition("=")
        text = class_help(key.removesuffix(".help"), name)
    elif topic is None or keys is None:
        text = short_help(parser, verb, {} if keys is None else purposes([*keys.names], keys.add))
    else:
        keys.add(parser)
        text = topic_help(parser, verb, topic, [*keys.names])
    sys.stdout.write(text)
    sys.exit(0)


def _as_overrides(
    options: Iterable[str], lists: Collection[str], texts: Collection[str]
) -> Iterator[str | dict[str, str]]:
    """Options `--key=value` as overrides; each further value of an option that takes a list is appended.

    Values of `texts` are text, whatever is in it, also "null". Numbers of a list may be separated by commas alone.

    Raises:
        UserError: `resume` is given twice.
    """
    names = set[str]()
    for option in options:
        name, _, value = option.removeprefix("--").partition("=")
        if name in ANY_TEXT and not _is_json_list(value):
            value = json.dumps([value])
        if name in lists and NUMBERS.fullmatch(value):
            value = f"[{value}]"
        if name == "resume" and name in names:  # of other options the last value counts
            raise UserError("resume: is given twice; one run is continued at a time")
        if name in texts:
            yield {name: value}
        else:
            yield f"{name}+={value}" if name in names & {*lists} else f"{name}={value}"
        names.add(name)


def _is_json_list(value: str) -> bool:
    try:
        return isinstance(json.loads(value), list)
    except (ValueError, RecursionError):
        return False


def _split(arguments: Sequence[str], flags: Collection[str], names: Collection[str]) -> tuple[list[str], ...]:
    """Split a command line into named options, configs and overrides `key=value`, and plain arguments."""
    options, items, plain, rest = list[str](), list[str](), list[str](), iter(arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        name = key.removeprefix("--")
        name = next((ours for ours in LIGHTNINGS.get(name, ()) if ours in names), name)
        if key in PRINTING:
            options.append(argument)
        elif re.match(r"-[A-Za-z_]", key) and key != "-c":
            raise UserError(f"{argument!r}: options start with two dashes, -{argument}")
        elif not key.startswith("-"):
            plain.append(argument)
        elif (option := name.replace("-", "_")) in flags and not equals:
            options.append(f"--{option}=true")
        else:
            if not equals:
                following = next(rest, None)
                if following is None:
                    raise UserError(f"{argument} has no value; options are written --key=value")
                value = following
            if key in ("-c", "--config"):
                if is_override(f"--{value}"):  # a path with a "="
                    find_config(value)  # raises if it is mistyped
                    value = f"./{value}"
                items.append(value)
            elif option in names:
                if option not in MAY_BE_EMPTY:
                    check_not_empty(option, value)
                options.append(f"--{option}={value}")
            else:
                items.append(f"--{option}={value}")
    return options, items, plain
