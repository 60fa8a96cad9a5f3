"""Mixing in both directions, for models that classify whole sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels
from kernels.core.documents import places

from .base import Site, State, TokenMixer, checked_site
from .expanded import MixerFactory
from .hgrn2 import HGRN2
from .registry import register


@register(
    recurrence="y_t = →mixer(x_1 … x_t) + ←mixer(x_T … x_t)",
    paper="bidirectional RNNs, Schuster and Paliwal 1997",
)
class Bidirectional(TokenMixer):
    """y_t = →mixer(x_1 … x_t) + ←mixer(x_T … x_t): one inner mixer each way, summed (Schuster and Paliwal 1997).

    It sees later tokens, so it is for models that classify sequences: it has no state to continue from, and cannot
    generate or predict the next token. Packed documents are reversed separately. Inner mixers neither read nor pass
    streams of other layers.

    Args:
        site: Where the layer sits in the model.
        mixer: The inner mixer, built once for each direction; the two share no parameters.
    """

    causal = False

    def __init__(self, site: Site, *, mixer: MixerFactory = HGRN2):
        site = checked_site(site, type(self))
        super().__init__()
        inner = site._replace(passed=())  # streams of lower layers end here
        self.forwards, self.backwards = mixer(inner), mixer(inner)
        self.constant_state = self.forwards.constant_state  # type: ignore[misc]

    def forward(  # type: ignore[override]  # without context parallelism, as a part of a sequence is not enough
        self, x: Tensor, state: State = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        if state is not None:
            raise self._has_no_state()
        y, _ = self.forwards(x, cu_seqlens=cu_seqlens)
        z, _ = self.backwards(_reversed(x, cu_seqlens), cu_seqlens=cu_seqlens)
        return y + _reversed(z, cu_seqlens), None

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        raise self._has_no_state()

    def _has_no_state(self) -> kernels.UserError:
        return kernels.UserError(
            f"state: {type(self).__name__} needs whole sequences, so there is no state to continue from"
        )

    def state_size(self, length: int | None = None) -> int | float:
        """Elements that the two inner recurrences hold while they run."""
        return self.forwards.state_size(length) + self.backwards.state_size(length)

    def flops(self, length: int) -> int:
        return self.forwards.flops(length) + self.backwards.flops(length)

    def share(self, below: Sequence[TokenMixer]) -> None:
        """Each direction shares with the same direction below."""
        self.forwards.share([other.forwards if isinstance(other, Bidirectional) else other for other in below])
        self.backwards.share([other.backwards for other in below if isinstance(other, Bidirectional)])


def _reversed(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x [B,T,…] reversed along time, each packed document separately."""
    if cu_seqlens is None:
        return x.flip(1)
    owner, position = places(cu_seqlens, x.shape[1])
    return x[:, cu_seqlens[owner + 1] - 1 - position]
