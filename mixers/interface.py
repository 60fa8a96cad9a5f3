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
        UserError: It is not a TokenMixer, its `forward` takes other arguments, or it needs a stream that no mixer of a
            lower layer passes.
    """
    name = type(mixer).__name__
    if not isinstance(mixer, TokenMixer):
        kind = "a module, but not a TokenMixer" if isinstance(mixer, nn.Module) else "not a TokenMixer"
        raise UserError(f"mixer: {name} is {kind}; mixers.wrap makes one of a causal module, and {TUTORIAL} writes one")
    signature, options = inspect.signature(mixer.forward), {"passed": None} if streams_of(mixer) else {}
    try:
        signature.bind(None, None, cu_seqlens=None, **options)
    except TypeError:
        call = CALL[:-1] + ", passed=None)" if options else CALL
        raise UserError(f"mixer: forward of {name} must take {call}, but it takes {signature}") from None
    if missing := [each for each in mixer.needs if each not in site.passed]:
        stream = f"the stream {missing[0]!r}, which no lower layer passes"
        raise UserError(f"mixer: {name} in layer {site.layer} needs {stream}")
    if getattr(mixer, "site", None) is None:
        mixer.site = site
    return mixer


def streams_of(mixer: TokenMixer) -> bool:
    """Return whether a mixer passes streams to higher layers, or reads those of lower ones."""
    return bool(mixer.passes or mixer.needs)


def checked_streams(result: Any, mixer: TokenMixer, x: Tensor) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """The result of `mixer` for x and the streams of lower layers, if it is (y, state, streams).

    Raises:
        UserError: It is something else, or has not the streams of `passes`, one entry for each token of x.
    """
    start, names = f"forward of {type(mixer).__name__} must return", ", ".join(mixer.passes) or "none"
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
        raise UserError(f"{start} (y, state, streams) where it is called with passed, got {_described(result)}")
    y, state = checked_result(result[:2], mixer, x)
    streams = result[2]
    if set(streams) != set(mixer.passes):
        raise UserError(f"{start} the streams that it declares ({names}), got {', '.join(streams) or 'none'}")
    for name, stream in streams.items():
        if not isinstance(stream, Tensor) or stream.shape[:2] != x.shape[:2]:
            shape = tuple(stream.shape) if isinstance(stream, Tensor) else _described(stream)
            raise UserError(f"{start} the stream {name} as [{x.shape[0]}, {x.shape[1]}, …] like x, got {shape}")
    return y, state, streams


def checked_result(result: Any, mixer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
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
