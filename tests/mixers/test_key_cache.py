"""Caches with room, in which a step of one token moves nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from mixers import (
    Features,
    ForgettingAttention,
    MultiheadLatentAttention,
    RMSNorm,
    Rotary,
    SigmoidGatedRMSNorm,
    SimpleRMSNorm,
    Site,
    SlidingWindowAttention,
    SoftmaxAttention,
    TokenMixer,
    YarnRotary,
    ZeroCentredRMSNorm,
)
from mixers.key_cache import in_slots, out_of_slots
from mixers.state import Slots, caches, positions_seen, slotted

from .variants import CAUSAL

SITE = Site(64, 2, layer=1, num_layers=3)
SLOTTED = [
    name
    for name, factory in CAUSAL.items()
    if hasattr(state := factory(SITE).init_state(1), "_fields") and slotted(state)
]


def converted(state: Any, convert: Callable[[Any, Tensor], Any]) -> Any:
    seen = positions_seen(state)
    assert seen is not None
    return state._replace(**{name: convert(getattr(state, name), seen) for name in slotted(state)})


def after(mixer: TokenMixer, lengths: list[int], dtype: torch.dtype) -> Any:
    """The state after sequences of some lengths."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, sum(lengths), 64, dtype=dtype)
    return mixer(x, mixer.init_state(len(lengths), dtype=dtype), cu_seqlens=bounds)[1]


def test_attention_has_caches_with_room():
    assert {"SoftmaxAttention", "SlidingWindowAttention", "MultiheadLatentAttention"} <= set(SLOTTED)
    assert "ForgettingAttention" in SLOTTED


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", SLOTTED)
def test_a_step_is_that_of_a_plain_cache(name: str, backend: str):
    """For rows of different lengths, the last of which is empty, and over the end of a window."""
    mixer = CAUSAL[name](SITE).double()
    state = after(mixer, [9, 3, 0], torch.float64)
    window = getattr(mixer, "window_size", None)
    roomy = converted(state, lambda cache, seen: in_slots(cache, seen, window or 20))
    with kernels.backend(backend):
        for t in range(10):
            x = torch.randn(3, 1, 64, dtype=torch.float64)
            before = {name: getattr(roomy, name).entries for name in slotted(roomy)}
            expected, state = mixer(x, state)
            y, roomy = mixer(x, roomy)
            torch.testing.assert_close(y, expected)
            assert all(getattr(roomy, name).entries is entries for name, entries in before.items())
            size = window - 1 if window else 10 + t
            plain = converted(roomy, lambda slots, seen, size=size: out_of_slots(slots, seen, size))
            for one, other in zip(plain, state, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", SLOTTED)
def test_a_step_on_triton(name: str):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("for the interpreter")
    mixer = CAUSAL[name](SITE)
    state = after(mixer, [9, 3, 0], torch.float32)
    window = getattr(mixer, "window_size", None)
    roomy = converted(state, lambda cache, seen: in_slots(cache, seen, window or 20))
    for _ in range(3):
        x = torch.randn(3, 1, 64)
        expected, state = mixer(x, state)
        with kernels.backend("triton"), kernels.implementations() as ran:
            y, roomy = mixer(x, roomy)
        assert ran["window_attention_token"] == {"triton"}
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


class DoubledNorm(RMSNorm):
    """A norm that is not that of the kernels."""

    @property
    def scale(self) -> Tensor:
        return 2 * super().scale


class BackwardRotary(Rotary):
    """Positions that are not those of the kernels."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, -positions)


class OwnAttention(SoftmaxAttention):
    """Calls a function that takes no `ops`."""

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return kernels.window_attention(2 * q, k, v, **{"cache": None, **options})


ALONE = {"rms_norm", "gated_rms_norm", "rotary", "activation_gate", "forget_gate"}  # ops with launches of their own
WITH_ATTENTION: dict[str, tuple[Callable[[Site], TokenMixer], set[str]]] = {
    "a gate per head": (partial(SoftmaxAttention, gate="head", qk_norm=RMSNorm, bias=True), set()),
    "a gate per channel": (
        partial(
            SoftmaxAttention,
            gate="channel",
            qk_norm=ZeroCentredRMSNorm,
            qk=Features(map=partial(Rotary, fraction=0.25)),
        ),
        set(),
    ),
    "a window": (
        partial(
            SlidingWindowAttention,
            window_size=6,
            num_heads=4,
            num_kv_heads=2,
            qk_norm=SimpleRMSNorm,
            qk=Features(map=partial(YarnRotary, factor=4.0, original_length=8)),
        ),
        set(),
    ),
    "no positions": (partial(SoftmaxAttention, qk=Features(), num_kv_heads=1, scale=0.5), set()),
    "norms of the width": (partial(SoftmaxAttention, qk_norm=RMSNorm, qk_norm_over="width"), {"rms_norm"}),
    "another norm": (partial(SoftmaxAttention, qk_norm=DoubledNorm), {"rms_norm"}),
    "other positions": (
        partial(SoftmaxAttention, qk=Features(map=BackwardRotary), gate="channel"),
        {"rotary", "activation_gate"},
    ),
    "convolutions": (partial(SoftmaxAttention, qk=Features(conv=3, map=Rotary)), {"rotary"}),
    "another attention": (partial(OwnAttention, qk_norm=RMSNorm), {"rms_norm", "rotary"}),
    "decays": (partial(ForgettingAttention, qk_norm=RMSNorm, num_kv_heads=1), set()),
    "decays, another norm": (partial(ForgettingAttention, qk_norm=DoubledNorm), {"rms_norm"}),
    "latents": (MultiheadLatentAttention, set()),
    "latents, a gate per head": (
        partial(MultiheadLatentAttention, gate="head", norm=ZeroCentredRMSNorm, kv_rank=20, rope_dim=10),
        set(),
    ),
    "latents, a gate per channel": (
        partial(MultiheadLatentAttention, gate="channel", rotary=None, q_rank=8),
        {"rms_norm", "activation_gate"},
    ),
    "latents alone": (partial(MultiheadLatentAttention, rotary=None, rope_dim=0), set()),
    "latents, another norm": (partial(MultiheadLatentAttention, norm=DoubledNorm), {"rms_norm", "rotary"}),
    "latents, other positions": (partial(MultiheadLatentAttention, rotary=BackwardRotary), {"rms_norm", "rotary"}),
    "latents, part of the positions": (
        partial(MultiheadLatentAttention, rotary=partial(Rotary, fraction=0.5)),
        {"rms_norm", "rotary"},
    ),
    "decays and shifts": (
        partial(ForgettingAttention, qk_norm=RMSNorm, shift=True, output=SigmoidGatedRMSNorm),
        {"gated_rms_norm"},
    ),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_a_step_without_further_launches(name: str):
    """Norms, positions, decays and gates are part of attention, unless they are not those of its kernels."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("for the interpreter")
    factory, alone = WITH_ATTENTION[name]
    mixer = factory(SITE)
    for parameter in mixer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    state = after(mixer, [9, 3, 0], torch.float32)
    window = getattr(mixer, "window_size", None)
    roomy = converted(state, lambda cache, seen: in_slots(cache, seen, window or 20))
    for backend in ("triton", "torch"):  # the second token sees what the first one has written
        x = torch.randn(3, 1, 64)
        expected, state = mixer(x, state)
        with kernels.backend(backend), kernels.implementations() as ran:
            y, roomy = mixer(x, roomy)
        assert ran["window_attention_token"] == {backend}
        assert backend == "torch" or ALONE & set(ran) == alone
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_only_single_tokens_are_added_in_place():
    mixer = CAUSAL["SoftmaxAttention"](SITE)
    state = converted(mixer.init_state(2), lambda cache, seen: in_slots(cache, seen, 8))
    with pytest.raises(ValueError, match=r"^cache: expected one token of each row"):
        mixer(torch.randn(2, 2, 64), state)
    with pytest.raises(ValueError, match=r"^cache: expected one token of each row"):
        mixer(torch.randn(1, 1, 64), state, cu_seqlens=torch.tensor([0, 1, 1]))


def test_slots_and_back():
    cache = torch.arange(1.0, 13.0).view(2, 6, 1)
    seen = torch.tensor([8, 2])  # of the first sequence, the first two tokens are gone
    cache[1, :4] = -1  # of no token
    ring = in_slots(cache, seen, 6)
    assert ring.entries[..., 0].tolist() == [[5, 6, 1, 2, 3, 4], [11, 12, 0, 0, 0, 0]]
    expected = cache.clamp(min=0)
    assert torch.equal(out_of_slots(ring, seen, 6), expected)
    assert torch.equal(out_of_slots(ring, seen, 3), expected[:, 3:])
    wide = in_slots(cache[1:], seen[1:], 9)
    assert wide.entries[0, :, 0].tolist() == [11, 12, 0, 0, 0, 0, 0, 0, 0]
    assert torch.equal(out_of_slots(wide, seen[1:], 12)[:, 6:], expected[1:])
    empty = in_slots(cache[:, :0], torch.zeros(2, dtype=torch.int64), 3)
    assert isinstance(empty, Slots)
    assert empty.entries.shape == (2, 3, 1)
    assert not empty.entries.any()


def test_fields_typed_as_caches_with_room_are_caches():
    state = CAUSAL["ForgettingAttention"](SITE).init_state(1)
    assert caches(state) == slotted(state) == ["k", "v", "log_decay"]
