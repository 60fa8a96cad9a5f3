from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.core.elementwise import sigmoid, tanh
from mixers import Projection, projection
from mixers.projection import Linear, LowRankLinear, OrthogonalLinear, adjacent, mapped

WIDTHS = {"q": 4, "k": 4, "v": 10}


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_separate_maps(bias: bool):
    projection, x = Projection(6, WIDTHS, bias=bias), torch.randn(2, 3, 6)
    parts = projection.state_dict()
    assert len(parts) == (2 * len(WIDTHS) if bias else len(WIDTHS))
    for y, name in zip(projection(x), WIDTHS, strict=True):
        torch.testing.assert_close(y, F.linear(x, parts[f"{name}.weight"], parts.get(f"{name}.bias")))


def test_outputs_are_views_of_one_product():
    q, k, v = Projection(6, WIDTHS)(torch.randn(2, 3, 6))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_adjacent_columns_are_joined_without_a_copy():
    q, k, v = Projection(6, WIDTHS)(torch.randn(2, 1, 6))
    for x, y, view in ((q, k, True), (k, v, True), (q, v, False), (k, q, False), (q, k.clone(), False)):
        joined = adjacent(x, y)
        assert torch.equal(joined, torch.cat([x, y], -1))
        assert (joined.data_ptr() == x.data_ptr()) == view


def test_neighbours_in_memory_that_are_no_columns_of_a_product_are_copied():
    memory = bytearray(64)
    x, y = (torch.frombuffer(memory, dtype=torch.float32, offset=at, count=8).view(1, 1, 8) for at in (0, 32))
    assert torch.equal(adjacent(x, y), torch.cat([x, y], -1))


@pytest.mark.parametrize("bias", [False, True])
def test_columns_that_a_product_lacks_change_nothing(bias: bool, monkeypatch: pytest.MonkeyPatch):
    module, x = Projection(6, WIDTHS, bias=bias), torch.randn(2, 3, 6, requires_grad=True)

    def results() -> list[Tensor]:
        q, k, v = module(x)
        loss = q.square().sum() + v.sin().sum()  # nobody uses k
        return [q, k, v, *torch.autograd.grad(loss, [x, *module.parameters()])]

    expected = results()
    monkeypatch.setattr(projection, "lacking", lambda x, columns: -columns % 8)
    actual = results()
    assert actual[0].stride() == (3 * 24, 24, 1)
    for y, z in zip(actual, expected, strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.gpu
def test_rows_of_whole_units_on_a_gpu():
    x = torch.randn(600, 8, dtype=torch.bfloat16, device="cuda")
    assert [projection.lacking(x, n) for n in (10818, 4112, 4113)] == [14, 0, 15]
    assert [projection.lacking(few, 10818) for few in (x[:4], x.cpu())] == [0, 0]
    module = Projection(8, {"q": 16, "k": 18}, bias=True).to("cuda", torch.bfloat16)
    q, k = module(x)
    assert q.stride() == k.stride() == (48, 1)
    torch.testing.assert_close(torch.cat([q, k], 1), F.linear(x, module.weight, module.bias))


def test_a_state_dict_goes_by_names():
    model = nn.Sequential(nn.Linear(6, 6), Projection(6, WIDTHS))
    actual = {name: tuple(x.shape) for name, x in model.state_dict().items() if name.startswith("1.")}
    assert actual == {"1.q.weight": (4, 6), "1.k.weight": (4, 6), "1.v.weight": (10, 6)}
    # no view of the fused matrix: a file would hold all of it three times
    sizes = {len(x.untyped_storage()) for name, x in model.state_dict().items() if name.startswith("1.")}
    assert sizes == {4 * 4 * 6, 4 * 10 * 6}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_split_and_fused_weights_load(assign: bool, bias: bool):
    source, x = Projection(6, WIDTHS, bias=bias), torch.randn(2, 6)
    fused = {name: parameter.detach().clone() for name, parameter in source.named_parameters()}
    for state in (source.state_dict(), fused):
        before, copy = dict(state), Projection(6, WIDTHS, bias=bias)
        copy.load_state_dict(state, assign=assign)
        assert all(torch.equal(a, b) for a, b in zip(copy(x), source(x), strict=True))
        assert isinstance(copy.weight, nn.Parameter)
        assert state.keys() == before.keys()  # the caller's own is left alone


def test_a_missing_part_is_an_error():
    state = Projection(6, WIDTHS).state_dict()
    del state["k.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key"):
        Projection(6, WIDTHS).load_state_dict(state)


@pytest.mark.parametrize("activations", [(None, torch.sigmoid), (sigmoid, tanh)])
def test_maps_of_a_token_are_those_of_many_tokens(activations: tuple[Any, Any]):
    """In two launches, if the kernels have the activations."""
    dry_run = pytest.importorskip("kernels.gpu.paths").dry_run
    low_rank = [LowRankLinear(32, 8, 20, activation) for activation in activations]
    maps = [OrthogonalLinear(32, 24), *low_rank, Linear(32, 5, bias=False)]
    for parameter in torch.nn.ModuleList(maps).parameters():
        torch.nn.init.normal_(parameter)
    xs = torch.randn(4, 2, 3, 32).unbind(0)
    expected = mapped(list(zip(maps, xs, strict=True)))
    torch.testing.assert_close(expected, [module(x) for module, x in zip(maps, xs, strict=True)])
    with torch.no_grad(), kernels.backend("triton"):
        for t in range(3):
            token = [(module, x[:, t : t + 1]) for module, x in zip(maps, xs, strict=True)]
            torch.testing.assert_close(mapped(token), [y[:, t : t + 1] for y in expected], rtol=1e-4, atol=1e-5)
        with dry_run() as record:
            mapped(token)
    several = [launch.name for launch in record.launches] == ["linear.op.linear_several"] * 2
    assert several == (tanh in activations)
    biased, x = Linear(32, 5), xs[0][:1, :1]
    with torch.no_grad(), kernels.backend("triton"):
        torch.testing.assert_close(mapped([(biased, x)]), [biased(x)])
