import math

import torch

from mixers import ForgettingAttention, Site

SITE = Site(hidden_size=32, num_heads=4)


def test_the_gates_of_the_cache_are_fp32():
    mixer = ForgettingAttention(SITE, num_kv_heads=2).bfloat16()
    _, state = mixer(torch.randn(2, 5, 32).bfloat16(), mixer.init_state(2))
    assert (state.k.dtype, state.log_decay.dtype) == (torch.bfloat16, torch.float32)
    assert (mixer.state_size(5), mixer.state_size()) == (5 * (2 * 2 * 8 + 4), math.inf)
