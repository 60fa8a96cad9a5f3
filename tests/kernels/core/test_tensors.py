"""Ops name an argument that is not a tensor."""

import numpy as np
import pytest
import torch

import kernels

Q, DECAY, BETA = torch.ones(1, 4, 2, 16), -torch.ones(1, 4, 2), torch.ones(1, 4, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: kernels.linear_recurrence(Q, Q, Q, DECAY, cu_seqlens=[0, 4]),
            "cu_seqlens: must be a tensor, got a list",
        ),
        (lambda: kernels.linear_recurrence(np.ones((1, 4, 2, 16)), Q, Q), "q: must be a tensor, got a ndarray"),
        (lambda: kernels.delta_rule(Q, Q, Q, BETA.tolist()), "beta: must be a tensor, got a list"),
        (lambda: kernels.value_decay_recurrence(Q, Q, Q, Q.tolist()), "log_decay: must be a tensor, got a list"),
        (lambda: kernels.window_attention(Q, Q, Q.numpy()), "v: must be a tensor, got a ndarray"),
        (lambda: kernels.selective_scan([[1.0]], DECAY), "x: must be a tensor, got a list"),
        (lambda: kernels.documents([0, 4], 4), "cu_seqlens: must be a tensor, got a list"),
    ],
)
def test_it_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
