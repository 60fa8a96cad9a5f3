import math

import pytest
import torch

import mixers
from mixers import Site, SlidingWindowAttention, SoftmaxAttention

SITE = Site(hidden_size=32, num_heads=4)


def influence(mixer: mixers.TokenMixer, length: int, on: int) -> list[int]:
    """The tokens that the output at `on` depends on."""
    x = torch.randn(1, length, 32, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(mixer.double()(x)[0][:, on].square().sum(), x)[0]
    return [t for t in range(length) if gradient[0, t].any()]


@pytest.mark.parametrize("length", [20, 90])  # shorter and longer than a block
@pytest.mark.parametrize("window", [2, 5])
def test_a_window_counts_the_token_itself(window: int, length: int):
    # w − 1 positions back still has influence, w positions back has none
    seen = influence(SlidingWindowAttention(SITE, window_size=window), length, on=length - 4)
    assert seen == list(range(length - 4 - window + 1, length - 3))


def test_full_attention_sees_everything_before():
    assert influence(SoftmaxAttention(SITE), 20, on=15) == list(range(16))


@pytest.mark.parametrize("window", [2, 7])
def test_a_window_holds_while_decoding(window: int):
    mixer = SlidingWindowAttention(SITE, window_size=window).double()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    other = x.clone()
    other[:, : 20 - window] += 1  # all that the last token must not see
    outputs = []
    for input in (x, other):
        _, state = mixer(input[:, :13], mixer.init_state(2))
        for t in range(13, 20):
            y, state = mixer(input[:, t : t + 1], state)
        outputs.append(y)
    torch.testing.assert_close(outputs[1], outputs[0])


def test_the_cache_holds_the_last_keys():
    mixer = SlidingWindowAttention(SITE, window_size=6, num_kv_heads=2, qk=mixers.Features())
    state = mixer.init_state(2)
    assert state.k.shape == state.v.shape == (2, 5, 2, 8)
    x = torch.randn(2, 9, 32)
    _, k, v = mixer.in_proj(x)
    _, state = mixer(x[:, :3], state)
    assert torch.equal(state.position, torch.tensor([3, 3]))
    assert not state.k[:, :2].any()  # flush right
    torch.testing.assert_close(state.k[:, 2:].flatten(2), k[:, :3])
    _, state = mixer(x[:, 3:], state)
    torch.testing.assert_close(state.k.flatten(2), k[:, 4:])
    torch.testing.assert_close(state.v.flatten(2), v[:, 4:])


def test_state_sizes():
    full = SoftmaxAttention(SITE, num_kv_heads=2)
    assert full.state_size(10) == 2 * 10 * 2 * 8
    assert full.state_size() == math.inf
    assert not full.constant_state
    window = SlidingWindowAttention(SITE, window_size=6)
    assert window.state_size() == window.state_size(100) == 2 * 5 * 32
    assert window.state_size(3) == 2 * 3 * 32


def test_the_default_window_is_2048():
    assert SlidingWindowAttention(SITE).window_size == 2048


def test_a_window_as_long_as_the_sequence_is_full_attention():
    torch.manual_seed(1)
    full = SoftmaxAttention(SITE)
    torch.manual_seed(1)
    window = SlidingWindowAttention(SITE, window_size=20)
    x = torch.randn(1, 20, 32)
    assert torch.equal(window(x)[0], full(x)[0])


def test_positions_are_relative():
    # only differences of angles count: the same tokens, as if 1000 others had come before and were forgotten
    mixer = SoftmaxAttention(SITE).double()
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    late = mixer.init_state(1)._replace(position=torch.tensor([1000]))
    y, late = mixer(x[:, :7], late)
    z, _ = mixer(x[:, 7:], late)
    torch.testing.assert_close(torch.cat([y, z], 1), mixer(x)[0])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"window_size": 1}, "window_size"),
        ({"window_size": 0}, "window_size"),
    ],
)
def test_mistakes(arguments: dict, field: str):
    with pytest.raises(mixers.UserError, match=rf"^{field}: "):
        SlidingWindowAttention(SITE, **arguments)
