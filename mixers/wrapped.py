"""Any causal module as a token mixer, at the price of reading the past again at each step."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import kernels

from .base import Site, TokenMixer, checked_site
from .per_document import per_document
from .state import Cache, Position


class WrappedState(NamedTuple):
    """The state of a Wrapped module."""

    inputs: Cache  # all inputs [N,S,hidden]
    seen: Position  # [N]


class Wrapped(TokenMixer):
    """A module that maps x [B,T,hidden] to y [B,T,hidden] causally, as a token mixer.

    Each document is one call of the module. It has no recurrence that could be continued, so the state is the inputs of
    all tokens, and each call computes the outputs of all of them again: decoding T tokens takes T calls of up to T
    tokens. It cannot be expanded, and cannot share sequences among processes.

    Args:
        site: Where the layer sits in the model.
        module: The module, called with hidden_size; for each layer a new one.
    """

    constant_state: ClassVar[bool] = False

    def __init__(self, site: Site, *, module: Callable[[int], nn.Module]):
        super().__init__()
        self.site = checked_site(site, type(self))
        made = module(site.hidden_size)
        if not isinstance(made, nn.Module):
            raise kernels.UserError(f"module: {module!r} made {made!r}, which is not a module of PyTorch")
        if isinstance(made, TokenMixer):
            raise kernels.UserError(f"module: {type(made).__name__} is a TokenMixer already; use it directly")
        self.module = made

    def forward(  # type: ignore[override]
        self, x: Tensor, state: WrappedState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, WrappedState | None]:
        return per_document(self._mix, x, state, cu_seqlens)

    def _mix(self, x: Tensor, state: WrappedState | None) -> tuple[Tensor, WrappedState | None]:
        inputs = x if state is None else torch.cat([state.inputs.to(x.dtype), x], 1)
        y = self.run(inputs)
        if not isinstance(y, Tensor) or y.shape != inputs.shape:
            kind = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            name = type(self.module).__name__
            shape = tuple(inputs.shape)
            raise kernels.UserError(f"module: {name} must return y in the shape of x, {shape}, got {kind}")
        if state is None:
            return y, None
        return y[:, state.inputs.shape[1] :], WrappedState(inputs, state.seen + x.shape[1])

    def run(self, x: Tensor) -> Any:
        """Call the module for whole sequences x [B,T,hidden]."""
        return self.module(x)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> WrappedState:
        like = next(self.parameters(), torch.zeros(0))
        inputs = torch.zeros(
            batch_size, 0, self.site.hidden_size, device=device or like.device, dtype=dtype or like.dtype
        )
        return WrappedState(inputs, torch.zeros(batch_size, dtype=torch.int64, device=inputs.device))

    def state_size(self, length: int | None = None) -> int | float:
        return math.inf if length is None else length * self.site.hidden_size


def wrap(module: Callable[[int], nn.Module]) -> Callable[[Site], Wrapped]:
    """Make a token mixer of a causal module x [B,T,hidden] → y [B,T,hidden]; `Wrapped` says what it cannot do.

    ``mixers.check_mixer(mixers.wrap(MyModule))``; in a config, `{class_path: mixers.Wrapped, init_args: {module:
    my_file.MyModule}}`.

    Args:
        module: The class, or a function that makes the module of one layer from hidden_size.

    Raises:
        UserError: It is a module itself, which all layers would share.
    """
    if isinstance(module, nn.Module):
        name = type(module).__name__
        advice = f"pass the class {name}, or a function of hidden_size"
        raise kernels.UserError(f"module: {advice}, not one module, which all layers would share")
    if not callable(module):
        raise kernels.UserError(f"module: {module!r} is neither a class nor a function that makes a module")
    is_mixer = inspect.isclass(module) and issubclass(module, TokenMixer)
    if is_mixer:
        raise kernels.UserError(
            f"module: {getattr(module, '__name__', module)} is a TokenMixer already; use it directly"
        )
    return partial(Wrapped, module=module)
