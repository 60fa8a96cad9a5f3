"""Stacks: the mixer of each layer, by depth. A stack is a factory itself: site in, mixer out."""

from kernels import UserError
from mixers import MixerFactory, Site, TokenMixer


class Stack:
    """The mixers of all layers, by depth, which repeat after `period` layers.

    Subclass it for an order that `Pattern` cannot spell.
    """

    period: int = 1

    def __call__(self, site: Site) -> TokenMixer:
        """The mixer of one layer."""
        raise NotImplementedError

    def post_norm(self, layer: int) -> bool:
        """Return whether a block normalises after its mixer and MLP, x + norm(mixer(x)); by default before."""
        return False


class Pattern(Stack):
    """Any order, spelt out in letters: MMGS is two M layers, a G and an S, repeated.

    Args:
        pattern: One letter per layer, repeated over the depth.
        mixers: The mixer of each letter. An overlay changes those that it names, and removes those that are null in it.
        post_norm: The letters whose layers have their norms after mixer and MLP, x + norm(mixer(x)), not before. In
            OLMo-Hybrid, LLLA with A, attention after OLMo 3.
    """

    def __init__(self, pattern: str, mixers: dict[str, MixerFactory], post_norm: str = ""):
        missing, unused = sorted(set(pattern) - set(mixers)), sorted(set(mixers) - set(pattern))
        if not pattern or missing or unused:
            reason = "is empty" if not pattern else f"has no mixer for {missing}" if missing else f"never uses {unused}"
            raise UserError(f"pattern: {pattern!r} {reason}; each letter names one of mixers ({', '.join(mixers)})")
        if unknown := sorted(set(post_norm) - set(pattern)):
            raise UserError(f"post_norm: {post_norm!r} has {unknown}; its letters are those of pattern {pattern!r}")
        self._pattern, self._mixers, self._post_norm = pattern, mixers, post_norm
        self.period = len(pattern)

    def __call__(self, site: Site) -> TokenMixer:
        return self._mixers[self._letter(site.layer)](site)

    def post_norm(self, layer: int) -> bool:
        return self._letter(layer) in self._post_norm

    def _letter(self, layer: int) -> str:
        return self._pattern[layer % self.period]


class Uniform(Pattern):
    """One mixer, in every layer: the pattern A.

    Args:
        mixer: The mixer of every layer.
    """

    def __init__(self, mixer: MixerFactory):
        super().__init__("A", {"A": mixer})


class H1(Pattern):
    """Two alternating mixers, the pattern AB; in arXiv 2412.06464 Gated DeltaNet and sliding-window attention.

    Args:
        first: The mixer of layers 0, 2, 4 …
        second: The mixer of layers 1, 3, 5 …
    """

    def __init__(self, first: MixerFactory, second: MixerFactory):
        super().__init__("AB", {"A": first, "B": second})


class H2(Pattern):
    """Three mixers in turn, the pattern ABC; in arXiv 2412.06464 Mamba2, Gated DeltaNet and sliding-window attention.

    Args:
        first: The mixer of layers 0, 3, 6 …
        second: The mixer of layers 1, 4, 7 …
        third: The mixer of layers 2, 5, 8 …
    """

    def __init__(self, first: MixerFactory, second: MixerFactory, third: MixerFactory):
        super().__init__("ABC", {"A": first, "B": second, "C": third})
