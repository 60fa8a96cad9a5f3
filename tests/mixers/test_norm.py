"""Norms, and those between the recurrence and the output projection."""

import pytest
import torch

import mixers
import zoo
from mixers import Site

WITH_NORM_EPS = ["GLA", "RetNet", "TNL", "CosFormer2", "LinearAttention", "DeltaNet", "HGRN1", "HGRN2", "Mamba2"]


def outputs(mixer: mixers.TokenMixer) -> torch.Tensor:
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    return mixer(x)[0].detach()


@pytest.mark.parametrize("name", WITH_NORM_EPS)
def test_the_output_norms_eps_is_an_argument(name: str):
    entry = mixers.entry(name)
    arguments = [entry.mixer(Site(64, 2, layer=1, num_layers=2), **entry.tiny, norm_eps=eps) for eps in (1e-5, 1e12)]
    assert outputs(arguments[0]).abs().max() > 1e-3
    assert outputs(arguments[1]).abs().max() < 1e-4


def test_gated_deltanet_has_it_in_its_output():
    base = ["gated_deltanet.yaml", "model.vocab_size=64", "model.hidden_size=64", "model.num_heads=2"]
    output = {"class_path": "GatedRMSNorm", "init_args": {"eps": 1e12}}
    overlay = {"model": {"num_layers": 1, "stack": {"mixer": {"mixer": {"output": output}}}}}
    (mixer,) = zoo.build(*base, str(overlay).replace("'", '"')).mixers
    assert outputs(mixer).abs().max() < 1e-4


class HalfCentred(mixers.RMSNorm):
    """A norm whose weight is centred elsewhere."""

    offset = 0.5


@pytest.mark.parametrize(("norm", "first"), [(mixers.RMSNorm, 0), (mixers.ZeroCentredRMSNorm, 1), (HalfCentred, 0.5)])
def test_a_norm_as_an_argument_of_a_kernel_is_the_same(norm: type[mixers.RMSNorm], first: float):
    layer, x = norm(16, 1e-3), torch.randn(3, 16)
    of_kernel = layer.qk_norm()
    assert of_kernel is not None
    assert of_kernel.offset == first
    assert torch.equal(of_kernel(x), layer(x))


@pytest.mark.parametrize(("norm", "first"), [(mixers.RMSNorm, 0), (mixers.ZeroCentredRMSNorm, 1)])
def test_norms_are_the_formula(norm: type[mixers.RMSNorm], first: int):
    layer, (x, y, dy) = norm(16, 1e-3), torch.randn(3, 5, 16)
    assert torch.equal(layer(x), mixers.RMSNorm(16, 1e-3)(x))  # as they start
    with torch.no_grad():
        layer.weight.normal_()
    weight, x = layer.weight.detach().clone().requires_grad_(), x.requires_grad_()
    total, added = layer(x, y)
    assert torch.equal(total, x + y)
    for arguments, h in ((x, layer(x)), (x + y, added)):
        expected = arguments / (arguments.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (first + weight)
        torch.testing.assert_close(h, expected)
        for a, b in zip(
            torch.autograd.grad(h, [x, layer.weight], dy), torch.autograd.grad(expected, [x, weight], dy), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [mixers.RMSNorm, mixers.ZeroCentredRMSNorm, mixers.SimpleRMSNorm, mixers.LayerNorm])
def test_norms_start_without_a_scale(norm: type[mixers.Norm]):
    y = norm(256)(3 * torch.randn(50, 256) + (norm is mixers.LayerNorm))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(50), atol=1e-4, rtol=0)
    assert norm is not mixers.LayerNorm or y.mean(-1).abs().max() < 1e-5


def test_a_norm_of_ones_own_adds_before_it_norms():
    class Halves(mixers.Norm):
        def normed(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    total, h = Halves()(torch.ones(3), torch.full((3,), 2.0))
    assert (total.tolist(), h.tolist()) == ([3.0] * 3, [1.5] * 3)


def test_a_norm_without_a_weight():
    layer, (x, y) = mixers.SimpleRMSNorm(16, 1e-3), torch.randn(2, 5, 16)
    assert not [*layer.parameters()]
    assert torch.equal(layer(x), mixers.RMSNorm(16, 1e-3)(x))
    total, h = layer(x, y)
    assert torch.equal(total, x + y)
    assert torch.equal(h, layer(x + y))


def test_a_layer_norm_is_the_formula():
    layer, (x, y, dy) = mixers.LayerNorm(16, 1e-3), torch.randn(3, 5, 16)
    assert layer.weight.eq(1).all()
    assert layer.bias.eq(0).all()
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    total, h = layer(x, y)
    centred = total - total.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight + layer.bias
    torch.testing.assert_close(h, expected)
    assert torch.equal(h, layer(x + y))
    wanted = [layer.weight, layer.bias]
    for a, b in zip(torch.autograd.grad(h, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_layer_norm_in_low_precision():
    layer = mixers.LayerNorm(16).bfloat16()
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    total, h = layer(*torch.randn(2, 5, 16).bfloat16())
    assert total.dtype == h.dtype == torch.bfloat16


@pytest.mark.parametrize("norm", ["SimpleRMSNorm", "LayerNorm"])
def test_a_config_chooses_the_norm(norm: str):
    built = zoo.build("gla.yaml", "model.vocab_size=64", "model.num_layers=2", f"model.norm={norm}")
    actual = [type(part).__name__ for block in built.layers for part in (block.mixer_norm, block.mlp_norm)]
    assert {*actual, type(built.norm).__name__} == {norm}
    logits, _ = built(torch.arange(9)[None])
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())


def test_hgrn2_without_a_weight_in_its_norm():
    (mixer,) = zoo.build(
        "hgrn2.yaml",
        "model.vocab_size=64",
        "model.num_layers=1",
        "model.stack.mixer.mixer={class_path: HGRN2, init_args: {norm: SimpleRMSNorm, norm_eps: 1.0e-3}}",
    ).mixers
    assert "g_norm.weight" not in mixer.state_dict()
    assert mixer.g_norm.eps == 1e-3


def test_a_zero_centred_weight_keeps_its_bits():
    layer = mixers.ZeroCentredRMSNorm(8)
    arguments = {"weight": torch.full((8,), 1e-9)}  # 1 + w would round to 1
    layer.load_state_dict(arguments)
    assert torch.equal(layer.state_dict()["weight"], arguments["weight"])
    assert layer.bfloat16().weight.dtype == torch.float32
