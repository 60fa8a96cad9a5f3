"""Layers on boundaries that are padded for a CUDA graph: the same as on the boundaries themselves."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.core import static_documents as static
from kernels.core.documents import documents
from mixers import Site

from .variants import PRECONDITIONED, REGISTERED

FACTORIES = {**REGISTERED, **PRECONDITIONED}
ROWS = ([0, 5, 5, 21], [0, 0, 20, 21], [0, 1, 2, 12, 21])


def results(mixer: torch.nn.Module, x: Tensor, cu_seqlens: Tensor) -> Iterator[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    y, _ = mixer(x, cu_seqlens=cu_seqlens)
    yield y
    weight = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view(y.shape)
    leaves = [x, *(p for p in mixer.parameters() if p.requires_grad)]
    yield from torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FACTORIES)
def test_padded_boundaries_change_no_result(name: str, where: str):
    """On a GPU to the bit; on a CPU the gradients of a convolution are sums over padding as well."""
    torch.manual_seed(0)
    mixer = FACTORIES[name](Site(64, 2, layer=1, num_layers=3)).to(where)
    x = torch.randn(1, 21, 64, device=where, requires_grad=True)
    there = static.static_copy(torch.tensor(ROWS[0], dtype=torch.int32, device=where), 21)
    for bounds in ROWS:
        own = torch.tensor(bounds, dtype=torch.int32, device=where)
        static.static_documents(there, 21).fill(documents(own, 21))
        for actual, expected in zip(results(mixer, x, there), results(mixer, x, own), strict=True):
            if where == "cuda":
                assert torch.equal(actual, expected)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
