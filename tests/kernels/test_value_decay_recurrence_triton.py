"""The Triton kernel: under the interpreter without a GPU (fp32, small), on a GPU as it is."""

from functools import partial

import pytest
import torch

import kernels

from .recurrences import DECAYS, PACKED
from .test_linear_recurrence_triton import compare as compare_recurrence
from .test_value_decay_recurrence import inputs

pytest.importorskip("triton")

# in the backward pass, the fast way of the linear recurrence overflows where the slow one takes over
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


compare = partial(compare_recurrence, op=kernels.value_decay_recurrence)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 63, 130])
def test_any_decay(length: int, decay: str):
    compare(inputs(length, decay=decay, B=1, H=2, K=24, V=17, dtype=torch.float32))


def test_packed_documents():
    compare(inputs(200, decay="mixed", H=1, documents=PACKED, dtype=torch.float32))


def test_long_keys_and_many_values():
    compare(inputs(70, B=1, H=1, K=72, V=40, dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 64), (256, 64), (128, 128), (320, 48)])
def test_sizes_in_bf16(K: int, V: int, decay: str):
    a = inputs(333, decay=decay, H=4, K=K, V=V, dtype=torch.float32)
    a.update({name: a[name].bfloat16() for name in "qkv"})
    compare(a, tolerance=1e-2)


@pytest.mark.gpu
def test_a_captured_call():
    a = {name: x.cuda() for name, x in inputs(200, H=2, K=64, V=64, dtype=torch.float32).items()}
    expected = kernels.value_decay_recurrence(**a)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kernels.value_decay_recurrence(**a)[0]
    graph.replay()
    assert torch.equal(o, expected)
