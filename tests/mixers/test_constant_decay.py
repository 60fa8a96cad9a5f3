import copy
import math
from collections.abc import Callable

import pytest
import torch

import kernels
from mixers import TNL, ConstantDecay, Expanded, LayerwiseLinear, RetNet, Site, alibi_slopes

# the numbers of the function that ALiBi's authors published
SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2**-i for i in range(1, 9)],
    12: [*(2**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi(heads: int):
    assert alibi_slopes(heads) == pytest.approx(SLOPES[heads], rel=1e-12)


@pytest.mark.parametrize("heads", [3, 5, 7, 10, 20, 33])
def test_alibi_for_any_number_of_heads(heads: int):
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == heads
    assert all(2**-8 <= slope < 1 for slope in slopes)


def test_a_constant_stays_in_fp32():
    # 1 − 2⁻⁹ in bf16 is one: nothing would ever be forgotten
    values = [math.log1p(-(2.0**-9)), -0.3]
    decay = ConstantDecay(values).bfloat16()
    actual = decay(torch.zeros(1, dtype=torch.bfloat16))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(values))
    assert decay(torch.zeros(1, dtype=torch.float64)).tolist() == values
    assert decay(torch.zeros(1, device="meta")).is_meta


def test_a_constant_is_no_part_of_a_checkpoint():
    decay = ConstantDecay([-1.0])
    assert not decay.state_dict()
    assert not list(decay.parameters())
    assert torch.equal(copy.deepcopy(decay)(torch.zeros(1)), torch.tensor([-1.0]))


def test_a_constant_is_the_same_tensor_each_time():
    decay, like = ConstantDecay([-1.0]), torch.zeros(1)
    assert decay(like) is decay(like)


def test_a_change_of_the_constants_is_used():
    decay, like = ConstantDecay([-1.0, -2.0]), torch.zeros(1)
    decay(like)
    decay.log_decay = [-3.0, -4.0]
    assert decay(like).tolist() == [-3, -4]
    decay.log_decay[1] = -5.0  # a list, changed in place
    assert decay(like).tolist() == [-3, -5]


@pytest.mark.parametrize("op", [kernels.linear_recurrence, kernels.delta_rule])
def test_a_constant_is_checked_again_after_a_change_in_place(op: Callable):
    q, k, v, beta = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4), torch.rand(1, 5, 2)
    decay = torch.tensor([-0.1, -0.2])
    before = op(q, k, v, beta=beta, log_decay=decay)[0]
    decay[1] = -3
    actual = op(q, k, v, beta=beta, log_decay=decay)[0]
    assert torch.equal(actual, op(q, k, v, beta=beta, log_decay=decay.clone())[0])
    assert not torch.equal(actual, before)
    decay[0] = 1
    with pytest.raises(ValueError, match=r"^log_decay: must be ≤ 0, got 1$"):
        op(q, k, v, beta=beta, log_decay=decay)


@pytest.mark.parametrize("mixer", [TNL, RetNet])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("length", [1, 130])
def test_training_after_a_look_in_inference_mode(length: int, backend: str, mixer):
    # validation may come first, and what it leaves behind must not be what autograd refuses
    layer, x = mixer(Site(32, 4, 1, 3)), torch.randn(1, length, 32)
    with kernels.backend(backend):
        with torch.inference_mode():
            layer(x)
        layer(x)[0].sum().backward()
    assert layer.in_proj.weight.grad.isfinite().all()


def decays(mixer: TNL | RetNet) -> list[float]:
    return list(mixer.decay.log_decay)


@pytest.mark.parametrize("heads", [4, 6])
def test_tnl_forgets_less_with_every_layer(heads: int):
    for layer, depth in ((0, 1 + 1e-5), (1, 2 / 3 + 1e-5), (2, 1 / 3 + 1e-5), (3, 1e-5)):
        actual = decays(TNL(Site(8 * heads, heads, layer, 4)))
        assert actual == pytest.approx([-slope * depth for slope in SLOPES[heads]])


def test_tnl_with_one_layer():
    assert decays(TNL(Site(32, 4))) == pytest.approx([-slope * (1 + 1e-5) for slope in SLOPES[4]])
    assert TNL(Site(32, 4))(torch.randn(1, 5, 32))[0].isfinite().all()


@pytest.mark.parametrize("subheads", [True, False])
def test_tnl_expanded(subheads: bool):
    # ALiBi runs over all subheads
    actual = decays(Expanded(mixer=TNL, factor=4, subheads=subheads)(Site(32, 2)))
    assert actual == pytest.approx([-slope * (1 + 1e-5) for slope in SLOPES[8 if subheads else 2]])


def test_retnet():
    assert decays(RetNet(Site(32, 4))) == pytest.approx([math.log(1 - 2 ** (-5 - h)) for h in range(4)])
    mixer = RetNet(Site(32, 4))
    assert (mixer.key_size, mixer.value_size) == (8, 16)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_subheads_keep_the_range_of_retnet(factor: int):
    plain = decays(RetNet(Site(32, 4)))
    actual = decays(Expanded(mixer=RetNet, factor=factor)(Site(32, 4)))
    assert len(actual) == 4 * factor
    assert actual[::factor] == plain  # the first subhead of each head is the head that was
    assert actual == sorted(actual)
    assert math.log(1 - 2 ** (-5 - 4)) > actual[-1] >= plain[-1]
    assert decays(Expanded(mixer=RetNet, factor=factor, subheads=False)(Site(32, 4))) == plain


def test_tnls_other_slopes_are_a_component():
    """flash-linear-attention's reading: linear in the head, none for head 0, falling with the layer to 1/L of it."""
    site = Site(32, 4, layer=1, num_layers=4)
    actual = TNL(site, decay=LayerwiseLinear).decay(torch.zeros(1))
    torch.testing.assert_close(actual, torch.tensor([0.0, -1.5, -3.0, -4.5]))
