"""The help of a verb: examples, its options, and the keys of a config by group."""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from jsonargparse import ArgumentParser

from kernels import UserError
from zoo.config.explain import unknown, wrong_value
from zoo.config.jsonargparse_internals import take_no_files
from zoo.config.keys import KEYS, PURPOSES
from zoo.config.parser import run_keys
from zoo.config.resolve import Group, find_class
from zoo.config.signatures import alternatives, component, parameters, passed_by_position, settable

EXAMPLES = {
    "fit": (
        "python cli.py fit --config gdn_h2.yaml",
        "python cli.py fit --config gdn_h2.yaml --config size/400m.yaml --trainer.max_steps=300 --run=try",
        "python cli.py fit --resume runs/try --trainer.max_steps=600",
    ),
    "validate": ("python cli.py validate --checkpoint runs/try",),
    "test": ("python cli.py test --checkpoint runs/try",),
    "predict": ("python cli.py predict --checkpoint runs/try --output losses.jsonl",),
    "compare": (
        "python cli.py compare gdn_h2.yaml gla.yaml transformer.yaml --trainer.max_steps=300",
        "python cli.py compare gla.yaml retnet.yaml --config train/muon.yaml",
    ),
    "sweep": ("python cli.py sweep --config sweep/heads.yaml --dry-run",),
    "generate": ('python cli.py generate --checkpoint runs/try --prompt "def " --max_new_tokens=100',),
    "evaluate": ("python cli.py evaluate --checkpoint runs/try --tasks=s_niah_1,passkey",),
    "inspect": ('python cli.py inspect --checkpoint runs/try --prompt "def f(x):" --output inspection',),
    "export": ("python cli.py export --checkpoint runs/try --output exported",),
    "convert": ("python cli.py convert --checkpoint some-hf-folder --output converted",),
    "statex": ("python cli.py statex --checkpoint runs/try --layers=4 --init=reinit --output larger",),
    "linearise": ("python cli.py linearise --checkpoint runs/try --mixer=NAME --keep=every:4 --output student",),
    "mixers": ("python cli.py mixers --hidden_size=2048 --num_heads=16",),
    "doctor": ("python cli.py doctor --output doctor.json",),
}
ALL = "all"  # the topic of everything


def usage_line(verb: str, parameters: Mapping[str, inspect.Parameter], positional: str | None, configs: bool) -> str:
    """The usage of a verb: plain arguments, options that it cannot do without, and configs."""
    required = {name for name, each in parameters.items() if each.default is each.empty} | {"checkpoint"}
    parts = [f"--{name} {name.upper()}" for name in parameters if name in required - {positional}]
    if configs and positional is None:
        parts.append("[--config OVERLAY …]" if parts else "--config NAME [--config OVERLAY …]")
    if positional is not None:
        plain = f"{positional.upper()} …" if positional.endswith("s") else positional.upper()
        parts.insert(0, plain if positional in required else f"[{plain}]")
    return " ".join([f"cli.py {verb}", *parts, "[--key=value …]"])


def purposes(keys: Sequence[str], add: Callable[[ArgumentParser], Any]) -> dict[str, str]:
    """Key → the first sentence about it; `add` adds keys that a run does not have, such as a sweep's, to a parser."""
    sentences = dict(PURPOSES)
    if not {*keys} <= {*sentences}:
        add(parser := ArgumentParser())
        helps = {action.dest: str(action.help) for action in parser._actions}
        sentences |= {key: re.split(r"[.;] |\.?$", helps[key], maxsplit=1)[0] for key in keys if key not in sentences}
    return {key: sentences[key] for key in keys}


def short_help(parser: ArgumentParser, verb: str, keys: Mapping[str, str]) -> str:
    """Examples, the options of a verb, which `parser` has, and the keys of a config with their purposes."""
    for group in parser._action_groups:
        if group.title == (parser.description or "").rstrip("."):
            group.title = f"options of {verb}"
    head, options, rest = parser.format_help().partition("options:\n")
    examples = [f"  {example}" for example in EXAMPLES.get(verb, ())]
    lines = [head.rstrip(), "", *(["examples:", *examples, ""] if examples else []), options + rest.rstrip()]
    if keys:
        lines += ["", f"keys of a config (--help KEY lists what is in one, --help {ALL} everything):"]
        lines += [f"  {key:<27}{textwrap.shorten(what, 70, placeholder=' …')}" for key, what in keys.items()]
    return "\n".join(lines) + "\n"


def topic_help(parser: ArgumentParser, verb: str, topic: str, keys: Sequence[str]) -> str:
    """Describe one key of a config, or with `all` every option and key of `parser`.

    Raises:
        UserError: The key does not exist.
    """
    if topic == ALL:
        return parser.format_help()
    group = topic.split(".")[0]
    options = [action for action in parser._actions if f"{action.dest}.".startswith(f"{topic}.")]
    if group in keys and not options:
        raise UserError(unknown(topic, group, [action.dest for action in parser._actions]))
    if group not in keys:
        raise UserError(f"--help {topic}: no key of {verb} (keys: {', '.join([*keys, ALL])})")
    parser.description = None
    for each in parser._action_groups:
        each._group_actions = [action for action in each._group_actions if action in options]
    text = parser.format_help().partition("\n\n")[2]  # after the usage
    if topic == "data":
        others = f"python cli.py {verb} --data.help MixedText lists those of another class"
        text += f"\nkeys of TextData, the default ({others}):\n{class_help('data', 'TextData')}"
    return text


def class_help(key: str, name: str) -> str:
    """Describe the arguments of a class that a key may name, as in `--data.help MixedText`.

    Raises:
        UserError: The key does not exist, or takes no such class.
    """
    import mixers

    mixers.names()  # plug-ins register before a class is looked up
    group, _, rest = key.partition(".")
    entry = run_keys().get(group)
    if isinstance(entry, Group):
        entry = parameters(entry.cls).get(rest)
    if entry is None:
        raise UserError(unknown(f"{key}.help", "", KEYS))
    hint = entry.hint
    options = {part for option in alternatives(hint) for part in (option, *get_args(option)) if component(part)}
    cls = find_class(name, options)
    if not isinstance(cls, type):
        raise UserError(wrong_value(key, hint, name))
    parser = ArgumentParser(usage="")
    skipped = {*settable(cls)} - {*settable(cls, max(map(passed_by_position, alternatives(hint))))}
    parser.add_class_arguments(cls, key, fail_untyped=False, skip={*skipped})
    take_no_files(parser)
    return parser.format_help().partition(":\n")[2].partition("\n\n")[2]
