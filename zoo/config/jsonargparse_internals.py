"""Private functions of jsonargparse that have no public counterpart."""

import inspect
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse._actions import _ActionConfigLoad
from jsonargparse._parameter_resolvers import get_signature_parameters


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


def take_no_files(parser: ArgumentParser) -> None:
    """Remove the options of a parser that read the arguments of a whole class from a file, such as `--model FILE`."""
    for action in [each for each in parser._actions if isinstance(each, _ActionConfigLoad)]:
        parser._actions.remove(action)
        for option in action.option_strings:
            del parser._option_string_actions[option]
        for group in parser._action_groups:
            if action in group._group_actions:
                group._group_actions.remove(action)
