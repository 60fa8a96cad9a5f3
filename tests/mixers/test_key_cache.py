"""Caches with room, in which a step of one token moves nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from mixers import Site, TokenMixer
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
