"""Private functions of jsonargparse that have no public counterpart."""

import inspect
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse._actions import _ActionConfigLoad
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._typehints import ActionTypeHint

from zoo.config.keys import KEYS


def followed_parameters(cls: type) -> list[inspect.Parameter]:
    """Return the parameters of a constructor, with those that its `*args` and `**kwargs` pass on to other functions.

    jsonargparse finds these in the source code, and resolves annotations that are only imported for type checkers. A
    default that it cannot determine is `...`.
    """
    parameters = []
    for each in get_signature_parameters(cls, None, logger=False):
        default: Any = each.default
        if type(default).__module__.startswith("jsonargparse"):
            default = ...
        kind = inspect.Parameter.KEYWORD_ONLY if each.kind is None else each.kind
        parameters.append(inspect.Parameter(each.name, kind, default=default, annotation=each.annotation))
    return parameters


def entries(namespace: Namespace) -> list[tuple[str, Any]]:
    """The names and values in a namespace. It keeps names of its methods, such as `items`, behind a mark."""
    return [(name.removeprefix("\u200b"), value) for name, value in vars(namespace).items()]


def take_no_files(parser: ArgumentParser) -> None:
    """Let no option of a parser read its value from a file: neither the arguments of a class, nor a component."""
    for action in parser._actions:
        if isinstance(action, ActionTypeHint):
            action._enable_path = False
            action.sub_add_kwargs = {**getattr(action, "sub_add_kwargs", {}), "sub_configs": False}
    for action in [each for each in parser._actions if isinstance(each, _ActionConfigLoad)]:
        parser._actions.remove(action)
        for option in action.option_strings:
            del parser._option_string_actions[option]
        for group in parser._action_groups:
            if action in group._group_actions:
                group._group_actions.remove(action)


def link_targets(parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the targets in a run's config that `link_arguments` sets when parsing, and when classes are built."""
    group = getattr(parser, "_links_group", None)
    links: list[Any] = [] if group is None else group._group_actions
    of_runs = [(each.target[0], each.apply_on) for each in links if each.target[0].split(".")[0] in KEYS]
    return [key for key, on in of_runs if on == "parse"], [key for key, on in of_runs if on != "parse"]
