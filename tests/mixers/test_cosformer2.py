import copy

import pytest
import torch

import kernels
from mixers import TPE, CosFormer2, Expanded, Features, Site

from .test_parity import shaken

SITE = Site(32, 4)


def test_one_theta_for_queries_and_keys():
    mixer = CosFormer2(SITE)
    assert [name for name, _ in mixer.named_parameters() if "theta" in name] == ["q_features.map.theta"]
    assert mixer.k_features.map.theta is mixer.q_features.map.theta
    copied = copy.deepcopy(mixer)
    assert copied.k_features.map.theta is copied.q_features.map.theta is not mixer.q_features.map.theta


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loads(assign: bool):
    source, loaded = shaken(CosFormer2(SITE).double()), CosFormer2(SITE).double()
    loaded.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    assert loaded.k_features.map.theta is loaded.q_features.map.theta
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    assert torch.equal(loaded(x)[0], source(x)[0])


def test_theta_stays_shared_from_the_meta_device():
    with torch.device("meta"):
        mixer = CosFormer2(SITE)
    mixer.to_empty(device="cpu")
    for module in mixer.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    assert mixer.k_features.map.theta is mixer.q_features.map.theta
    torch.testing.assert_close(mixer.q_features.map.theta, CosFormer2(SITE).q_features.map.theta)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_positions_restart_in_every_document(backend: str):
    mixer, x = shaken(CosFormer2(SITE).double()), torch.randn(1, 30, 32, dtype=torch.float64)
    x[:, 20:] = x[:, :10]
    with kernels.backend(backend):
        y, state = mixer(x, mixer.init_state(4), cu_seqlens=torch.tensor([0, 13, 13, 20, 30]))
    assert state.position.tolist() == [13, 0, 7, 10]
    torch.testing.assert_close(y[:, 20:], y[:, :10])  # the same tokens at the same positions
    # rows go on from where each of them stands
    more = torch.randn(1, 6, 32, dtype=torch.float64)
    z, state = mixer(more, state, cu_seqlens=torch.tensor([0, 2, 3, 3, 6]))
    assert state.position.tolist() == [15, 1, 7, 13]
    torch.testing.assert_close(z[:, :2], mixer(torch.cat([x[:, :13], more[:, :2]], 1))[0][:, 13:])


def test_features_double_the_state():
    assert CosFormer2(SITE).state_size() == 4 * 16 * 8
    assert CosFormer2(SITE, qk=Features(activation="silu")).state_size() == 4 * 8 * 8
    assert Expanded(mixer=CosFormer2, factor=4)(SITE).state_size() == 4 * CosFormer2(SITE).state_size()


def test_rates_of_tpe_are_evenly_spaced_on_a_logarithmic_scale():
    # from 2^4 to 2^−13 a token
    for size, rates in ((3, [16, 2**-4.5, 2**-13]), (5, [16, 2**-0.25, 2**-4.5, 2**-8.75, 2**-13])):
        mixer, x = TPE(Site(size, 1), size=size), torch.zeros(1, 30, size)
        x[:, 0] = 1
        with torch.no_grad():
            mixer.weight.copy_(torch.eye(size))  # channel e reads sum e alone
        expected = (-torch.arange(30)[:, None] * torch.tensor(rates)).exp()
        torch.testing.assert_close(mixer(x)[0][0], expected, atol=1e-6, rtol=1e-5)


def test_tpe_starts_with_small_weights_and_the_token_itself():
    weight = TPE(Site(256, 4), size=64).weight
    assert weight.std(0)[1:].mean().item() == pytest.approx(0.02, rel=0.05)
    assert weight[:, 0].mean().item() == pytest.approx(1, abs=0.01)
