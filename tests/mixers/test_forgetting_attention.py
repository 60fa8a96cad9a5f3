import math

import pytest
import torch
from torch import nn

import mixers
from mixers import ForgettingAttention, Site, SoftmaxAttention

SITE = Site(hidden_size=32, num_heads=4)


def with_gates(value: float) -> tuple[ForgettingAttention, SoftmaxAttention]:
    """A layer whose gates all have one raw value, and softmax attention without positions with the same weights."""
    mixer, plain = ForgettingAttention(SITE), SoftmaxAttention(SITE, qk=mixers.Features())
    weights = mixer.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    mixer.load_state_dict(weights | {"in_proj.f.weight": torch.zeros(4, 32)})
    nn.init.constant_(mixer.f_bias, value)
    return mixer, plain


def test_who_never_forgets_attends_as_without_positions():
    mixer, plain = with_gates(30.0)
    x = torch.randn(2, 20, 32)
    torch.testing.assert_close(mixer(x)[0], plain(x)[0])


def test_who_forgets_all_sees_the_token_alone():
    mixer, plain = with_gates(-80.0)
    x = torch.randn(2, 20, 32)
    torch.testing.assert_close(mixer(x)[0].flatten(0, 1), plain(x.flatten(0, 1)[:, None])[0][:, 0])


def test_the_gates_of_the_cache_are_fp32():
    mixer = ForgettingAttention(SITE, num_kv_heads=2).bfloat16()
    _, state = mixer(torch.randn(2, 5, 32).bfloat16(), mixer.init_state(2))
    assert (state.k.dtype, state.log_decay.dtype) == (torch.bfloat16, torch.float32)
    assert (mixer.state_size(5), mixer.state_size()) == (5 * (2 * 2 * 8 + 4), math.inf)


def test_a_shift_replaces_keys_and_values_by_the_last_ones():
    mixer = ForgettingAttention(SITE, shift=True)
    with torch.no_grad():
        mixer.in_proj.weight[-8:] = 0  # α = ½
    x = torch.randn(1, 6, 32)
    _, state = mixer(x, mixer.init_state(1))
    k = mixer.in_proj(x)[1]
    before = torch.cat([torch.zeros(1, 1, 32), k[:, :-1]], 1)
    torch.testing.assert_close(state.k.flatten(2), (before + k) / 2)


def test_mistakes():
    with pytest.raises(mixers.UserError, match=r"^num_kv_heads: 3 does not divide num_heads 4$"):
        ForgettingAttention(SITE, num_kv_heads=3)
    with pytest.raises(mixers.UserError, match=r"^mixer: ForgettingAttention has no matrix state to expand; .*$"):
        mixers.Expanded(mixer=ForgettingAttention, factor=2)(SITE)
