"""Two layers as one mixer, of which the upper one reads what the lower one passes."""

from typing import Any

import torch
from torch import Tensor

from .base import Site, State, TokenMixer, checked_site
from .context_parallel import ContextParallel
from .expanded import MixerFactory
from .interface import checked_streams, placed


class TwoLayers(TokenMixer):
    """y = upper(x + lower(x)), where `upper` receives the streams that `lower` passes.

    The contract is checked with it for mixers that pass streams, since such a mixer alone shows half of its code.

    Args:
        site: Where the lower layer sits in the model.
        lower: The mixer that passes streams.
        upper: The mixer above it.
    """

    def __init__(self, site: Site, *, lower: MixerFactory, upper: MixerFactory):
        super().__init__()
        self.site = checked_site(site, type(self))
        self.lower = placed(lower(site), site)
        above = site._replace(passed=(*site.passed, *self.lower.passes))
        self.upper = placed(upper(above), above)
        self.constant_state = self.lower.constant_state and self.upper.constant_state  # type: ignore[misc]

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        cu_seqlens: Tensor | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, State]:
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        if context_parallel is not None:
            options["context_parallel"] = context_parallel
        below, above = (None, None) if state is None else state
        y, below, passed = checked_streams(self.lower(x, below, passed={}, **options), self.lower, x)
        y, above, _ = checked_streams(self.upper(x + y, above, passed=passed, **options), self.upper, x)
        return y, None if state is None else (below, above)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        return tuple(mixer.init_state(batch_size, device, dtype) for mixer in (self.lower, self.upper))

    def state_size(self, length: int | None = None) -> int | float:
        return self.lower.state_size(length) + self.upper.state_size(length)

    def flops(self, length: int) -> int:
        return self.lower.flops(length) + self.upper.flops(length)
