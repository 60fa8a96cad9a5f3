"""The interface of a token mixer: what is missing or returned wrongly ends in one sentence, in models and tests."""

import inspect
from typing import Any

from torch import Tensor, nn

from kernels import UserError

from .base import TUTORIAL, Site, TokenMixer

CALL = "(x, state=None, *, cu_seqlens=None)"


def placed(mixer: object, site: Site) -> TokenMixer:
    """A mixer that was built for a site, which it knows afterwards.

    Raises:
        UserError: It is not a TokenMixer, or its `forward` takes other arguments.
    """
    name = type(mixer).__name__
    if not isinstance(mixer, TokenMixer):
        kind = "a module, but not a TokenMixer" if isinstance(mixer, nn.Module) else "not a TokenMixer"
        raise UserError(f"mixer: {name} is {kind}; mixers.wrap makes one of a causal module, and {TUTORIAL} writes one")
    signature = inspect.signature(mixer.forward)
    try:
        signature.bind(None, None, cu_seqlens=None)
    except TypeError:
        raise UserError(f"mixer: forward of {name} must take {CALL}, but it takes {signature}") from None
    if getattr(mixer, "site", None) is None:
        mixer.site = site
    return mixer


def checked_result(result: Any, mixer: TokenMixer, x: Tensor) -> tuple[Tensor, Any]:
    """The result of `mixer` for x, if it is (y, state) with y in the shape of x.

    Raises:
        UserError: It is something else.
    """
    start = f"forward of {type(mixer).__name__} must return"
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(f"{start} (y, state), got {_described(result)}")
    if not isinstance(result[0], Tensor):
        raise UserError(f"{start} (y, state) with a tensor y, got {_described(result[0])} as y")
    if result[0].shape != x.shape:
        raise UserError(f"{start} y in the shape of x, {tuple(x.shape)}, got {tuple(result[0].shape)}")
    return result


def _described(value: object) -> str:
    if value is None:
        return "None"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__.lower()}"
