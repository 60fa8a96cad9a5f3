"""`torch.compile` takes a layer of every mixer as one graph, and it computes what the layer does as it is written."""

import pytest
import torch

import mixers
from kernels.core.documents import documents, places
from mixers import LinearMixer, Site, TokenMixer
from mixers.base import positions

from .variants import PRECONDITIONED, REGISTERED

FACTORIES = {**REGISTERED, **PRECONDITIONED, "TPE": mixers.TPE}
MATRICES = [name for name, factory in FACTORIES.items() if isinstance(factory(Site(64, 2)), LinearMixer)]
BACKEND = "aot_eager_decomp_partition"  # all of the default one but the code that it generates
# a delta rule, decays per channel, per head and constant, two kinds of scan, and attention
ONE_OF_EACH_OP = ("GatedDeltaNet", "GLA", "Mamba2", "TNL", "Mamba1", "HGRN1", "SlidingWindowAttention")


def build(name: str) -> TokenMixer:
    return FACTORIES[name](Site(64, 2, layer=1, num_layers=3))


def compiled(f, backend: str = BACKEND, **options):
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, BACKEND if name in ONE_OF_EACH_OP else "eager") for name in FACTORIES]
    + [pytest.param(name, BACKEND, marks=pytest.mark.nightly) for name in FACTORIES if name not in ONE_OF_EACH_OP],
)
def test_a_layer_is_one_graph(name: str, backend: str):
    mixer, x = build(name), torch.randn(2, 21, 64, requires_grad=True)
    leaves, weight = [x, *mixer.parameters()], torch.randn(2, 21, 64)
    graph = compiled(mixer, backend, fullgraph=True)
    (y, state), (z, _) = graph(x), mixer(x)
    assert state is None
    torch.testing.assert_close(y, z)
    actual, expected = (torch.autograd.grad((o * weight).sum(), leaves) for o in (y, z))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param(BACKEND, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["GatedDeltaNet", "SlidingWindowAttention"])
def test_packed_documents_may_break_the_graph_but_not_the_result(name: str, backend: str):
    mixer, x = build(name), torch.randn(1, 21, 64)
    graph = compiled(mixer, backend)
    for bounds in ([0, 5, 5, 21], [0, 1, 12, 21]):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        torch.testing.assert_close(graph(x, cu_seqlens=cu_seqlens)[0], mixer(x, cu_seqlens=cu_seqlens)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_where_packed_tokens_stand_needs_no_host(dtype: torch.dtype):
    x, offset = torch.zeros(1, 12, 4), torch.tensor([3, 0, 7, 1, 0])
    graph = compiled(positions, fullgraph=True)
    for bounds in ([0, 0, 4, 4, 11, 12], [0, 1, 2, 3, 12, 12]):
        cu_seqlens = torch.tensor(bounds, dtype=dtype)
        for actual, expected in zip(graph(x, offset, cu_seqlens), positions(x, offset, cu_seqlens), strict=True):
            assert torch.equal(actual, expected)
            assert actual.dtype == torch.int64
        owner, place = compiled(places, fullgraph=True)(cu_seqlens, 12)
        assert torch.equal(owner, documents(cu_seqlens, 12).owner)
        assert torch.equal(place, documents(cu_seqlens, 12).positions)


@pytest.mark.slow
def test_a_step_of_decoding_is_one_graph():
    mixer, x = build("GatedDeltaNet"), torch.randn(2, 3, 64)
    with torch.no_grad():
        graph, state, other = compiled(mixer, fullgraph=True), mixer.init_state(2), mixer.init_state(2)
        for t in range(3):
            y, state = graph(x[:, t : t + 1], state)
            z, other = mixer(x[:, t : t + 1], other)
            torch.testing.assert_close(y, z)
    torch.testing.assert_close(state, other)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_on_a_device_packed_documents_are_part_of_the_graph(name: str, packed: bool):
    mixer, x = build(name).cuda(), torch.randn(1 if packed else 2, 150, 64, device="cuda", requires_grad=True)
    cu_seqlens = torch.tensor([0, 5, 5, 90, 150], dtype=torch.int32, device="cuda") if packed else None
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.02 * torch.randn_like(parameter)  # some start at zero, and stop gradients
    leaves, weight = [x, *mixer.parameters()], torch.randn_like(x)
    torch._dynamo.reset()
    # with padding, Inductor of PyTorch 2.11 writes and reads a buffer of Mamba3's backward pass in two layouts
    options = {"comprehensive_padding": False} if name == "Mamba3" else None
    graph = torch.compile(mixer, fullgraph=True, options=options)
    y, z = graph(x, cu_seqlens=cu_seqlens)[0], mixer(x, cu_seqlens=cu_seqlens)[0]
    torch.testing.assert_close(y, z, rtol=1e-3, atol=1e-3)
    actual, expected = (torch.autograd.grad((o * weight).sum(), leaves) for o in (y, z))
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 5e-3
