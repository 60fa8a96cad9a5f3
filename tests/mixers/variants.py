"""Factories of mixers by name, for tests that run over all of them."""

from collections.abc import Callable
from functools import partial

import mixers
from mixers import KDA, GatedDeltaNet, LinearMixer, Preconditioner, Site, TokenMixer

Factory = Callable[[Site], TokenMixer]

REGISTERED: dict[str, Factory] = {
    name: partial(mixers.entry(name).mixer, **mixers.entry(name).tiny) for name in mixers.names()
}
PRECONDITIONED: dict[str, Callable[..., LinearMixer]] = {
    f"{mixer.__name__}, preconditioned": partial(mixer, preconditioner=Preconditioner) for mixer in (KDA, GatedDeltaNet)
}
CAUSAL: dict[str, Factory] = {
    **{name: factory for name, factory in REGISTERED.items() if mixers.get(name).causal},
    **PRECONDITIONED,
}
