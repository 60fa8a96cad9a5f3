"""Rotary positions for longer sequences. Logits of models with them are compared in tests/zoo/saved/public."""

import math

import torch

from mixers import LinearRotary, Llama3Rotary, Rotary, YarnRotary

PAIR = torch.arange(32, dtype=torch.float64)
ORIGINAL = Rotary(2, 64).frequencies(PAIR)
TURNS = ORIGINAL * 512 / (2 * math.pi)  # in 512 tokens


def test_linear():
    torch.testing.assert_close(LinearRotary(2, 64, factor=4.0).frequencies(PAIR), ORIGINAL / 4)


def test_llama3_slows_slow_pairs_down():
    frequencies = Llama3Rotary(2, 64, factor=8.0, original_length=512).frequencies(PAIR)
    slow, fast = TURNS <= 1, TURNS >= 4
    assert slow.any()
    assert fast.any()
    torch.testing.assert_close(frequencies[slow], ORIGINAL[slow] / 8)
    torch.testing.assert_close(frequencies[fast], ORIGINAL[fast])
    between = frequencies[~slow & ~fast] / ORIGINAL[~slow & ~fast]
    assert between.numel()
    assert ((between > 1 / 8) & (between < 1)).all()


def test_yarn_slows_slow_pairs_down_and_makes_all_longer():
    rotary = YarnRotary(1, 64, factor=8.0, original_length=512, whole=False)
    frequencies, slow, fast = rotary.frequencies(PAIR), TURNS <= 1, TURNS >= 32
    assert slow.any()
    assert fast.any()
    torch.testing.assert_close(frequencies[slow], ORIGINAL[slow] / 8)
    torch.testing.assert_close(frequencies[fast], ORIGINAL[fast])
    x = torch.randn(2, 5, 1, 64)
    length = rotary(x, torch.arange(5)[None]).norm(dim=-1) / x.norm(dim=-1)
    torch.testing.assert_close(length, torch.full_like(length, 1 + 0.1 * math.log(8)))
    x = x.requires_grad_()
    rotary(x, torch.arange(5)[None]).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * rotary.amplitude**2 * x)
