"""Any mixer with a matrix state, with a larger state."""

from collections.abc import Callable
from typing import get_args

import kernels

from .arguments import check_sizes
from .base import LinearMixer, Site, TokenMixer, checked_site
from .expansion import Expand, Expansion, HeadWise, Recomputed


class Expanded:
    """A factory of a LinearMixer whose recurrent state is `factor` times larger (Liu et al., section 4).

    Called with a site, it builds the inner mixer there with `expand` set, without a wrapper at run time. With
    `factor: 1` it builds the inner mixer unchanged.

    Args:
        mixer: The mixer to expand.
        factor: E, how many times larger the state becomes.
        subheads: Whether to split an expanded head into E subheads of the original key size, with shared values, wider
            gates and summed outputs (equations 9 and 10); otherwise it is one head with key size E·K.
        expansion: How queries and keys are expanded: HeadWise, LowRank, DPFP, LFM, or your own.
        residual: Whether subhead 0 is the unchanged head, and the expansion makes the E − 1 others, whose outputs are
            multiplied by learned gains that start at 0. The mixer then starts as the one that is not expanded.
        recompute: What training on a GPU computes again in the backward pass, in place of keeping it: expanded queries
            and keys, each a tensor [B,T,heads·E·K], and the states before all chunks, [B,T/64,heads·E,K,V] (with few
            subheads, these are kept anyway). `true` is all of it, `queries` spares the keys, `states` the queries as
            well, and `false` keeps all of these. The activation in front of an expansion is always computed again.
            Queries and keys of other expansions than HeadWise, or with `residual`, are always kept.
    """

    def __init__(
        self,
        mixer: "Callable[[Site], LinearMixer] | Expanded",
        *,
        factor: int = 1,
        subheads: bool = True,
        expansion: Callable[[int, int, int, int], Expansion] = HeadWise,
        residual: bool = False,
        recompute: bool | Recomputed = True,
    ):
        check_sizes({"factor": factor})
        if residual and not subheads:
            raise kernels.UserError("residual: true needs subheads, one of which is the unchanged head")
        if recompute not in (True, False, *get_args(Recomputed)):
            raise kernels.UserError(f"recompute: {recompute!r} must be true, queries, states or false")
        self._mixer = mixer
        self._expand = Expand(factor, factor if subheads else 1, expansion, residual, recompute) if factor > 1 else None

    def __call__(self, site: Site) -> LinearMixer:
        """Build the mixer at a site."""
        if checked_site(site, Expanded).expand is not None:
            raise kernels.UserError("mixer: an Expanded inside an Expanded; multiply the factors instead")
        built = self._mixer(site if self._expand is None else site._replace(expand=self._expand))
        if not isinstance(built, LinearMixer):
            raise kernels.UserError(
                f"mixer: {type(built).__name__} has no matrix state to expand; Expanded takes a LinearMixer"
            )
        return built


MixerFactory = Callable[[Site], TokenMixer] | Expanded  # how an argument of a class in a config names a mixer
