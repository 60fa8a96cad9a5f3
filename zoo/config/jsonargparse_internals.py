"""Private functions of jsonargparse that have no public counterpart."""

import inspect
from typing import Any

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
