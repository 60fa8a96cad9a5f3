import pytest
import torch
from torch import Tensor

import mixers
from mixers import LRPE, FeatureMap, Features, GatedDeltaNet, LinearAttention, Rotary, Site, positions
from mixers.features import FeaturePath

ANYWHERE = torch.zeros(1, 1, dtype=torch.int64)


def features(spec: Features, x: Tensor, positions: Tensor = ANYWHERE) -> Tensor:
    y, _ = FeaturePath(spec, x.shape[2], x.shape[3]).to(x.dtype)(x, None, positions, None)
    return y


def test_positions_restart_in_each_document():
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    bounds = torch.tensor([0, 3, 3, 4, 7], dtype=torch.int32)  # the second document is empty
    place, following = positions(tokens, None, bounds)
    assert place.tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert following.tolist() == [3, 0, 1, 3]
    assert positions(tokens, torch.tensor([4]), None)[0].tolist() == [[4, 5, 6, 7, 8, 9, 10]]
    assert positions(tokens, None, None)[0].tolist() == [[0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("activation", "by_hand"),
    [
        ("identity", lambda x: x),
        ("silu", lambda x: x * x.sigmoid()),
        ("relu", lambda x: x.clamp(min=0)),
        ("elu1", lambda x: torch.where(x > 0, 1 + x, x.exp())),
    ],
)
def test_activations(activation: str, by_hand):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(features(Features(activation=activation), x), by_hand(x))


@pytest.mark.parametrize(
    ("norm", "by_hand"),
    [
        ("none", lambda x: x),
        ("l2", lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
        ("l1", lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-6)),
    ],
)
def test_norms(norm: str, by_hand):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    x[0, 0] = 0  # a head that is silent
    torch.testing.assert_close(features(Features(norm=norm), x), by_hand(x))


def test_convolutions_start_as_pytorchs_do():
    """Uniform up to (taps)^-½, with a bias of 0."""
    for taps in (2, 4):
        path = FeaturePath(Features(taps, bias=True), 4, 256)
        bound = taps**-0.5
        assert [path.weight.min().item(), path.weight.max().item()] == pytest.approx([-bound, bound], rel=0.01)
        assert path.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
        assert not path.bias.any()


def test_the_order_is_conv_activation_norm_map():
    class Double(FeatureMap):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return 2 * x

    x = torch.randn(1, 6, 2, 4, dtype=torch.float64)
    path = FeaturePath(Features(3, bias=True, activation="relu", norm="l1", map=Double), 2, 4).double()
    with torch.no_grad():
        path.bias.normal_()
    y, _ = path(x, None, ANYWHERE, None)
    line = torch.cat([torch.zeros(1, 2, 8, dtype=x.dtype), x.flatten(2)], 1)
    conv = torch.stack([(line[:, t : t + 3] * path.weight[:, 0].T).sum(1) for t in range(6)], 1) + path.bias
    active = conv.clamp(min=0).unflatten(-1, (2, 4))
    torch.testing.assert_close(y, 2 * active / (active.sum(-1, keepdim=True) + 1e-6))


def test_a_history_is_continued_only_if_given():
    path = FeaturePath(Features(4), 2, 4)
    x = torch.randn(1, 6, 2, 4)
    assert path(x, None, ANYWHERE, None)[1] is None
    _, history = path(x, path.init_history(1, "cpu", x.dtype), ANYWHERE, None)
    assert torch.equal(history, x[:, -3:].flatten(2))


def rotate(x: Tensor, position: int, **options: float) -> Tensor:
    return Rotary(1, x.shape[-1], **options)(x[None, None, None], torch.tensor([[position]]))[0, 0, 0]


def test_rotary_turns_pairs_of_the_two_halves():
    x = torch.randn(6, dtype=torch.float64)
    y = rotate(x, 3)
    for j in range(3):
        angle = torch.tensor(3 * 10000 ** (-2 * j / 6), dtype=torch.float64)
        turned = torch.complex(x[j], x[j + 3]) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(torch.complex(y[j], y[j + 3]), turned)
    assert torch.equal(rotate(x, 0), x)


def test_rotary_is_exact_at_far_positions_in_bf16():
    # a position of 10001 does not exist in bf16, so angles must not be made in the dtype of x
    x = torch.randn(64)
    assert (rotate(x.bfloat16(), 10001).float() - rotate(x.double(), 10001)).norm() < 0.02 * x.norm()


def test_lrpe_knows_differences_of_positions_alone():
    # [cos(θt)q, sin(θt)q]·[cos(θs)k, sin(θs)k] = Σ cos(θ(t − s)) q k
    q, k, lrpe = *torch.randn(2, 3, 8, dtype=torch.float64), LRPE(3, 8).double()
    with torch.no_grad():
        lrpe.theta.normal_()
    for t in (7, 50, 4000):
        a, b = (lrpe(x[None, None], torch.tensor([[at]]))[0, 0] for x, at in ((q, t), (k, t - 7)))
        assert a.shape == (3, 16)
        torch.testing.assert_close((a * b).sum(-1), (q * k * (7 * lrpe.theta).cos()).sum(-1))


def test_lrpe_starts_from_slower_and_slower_channels():
    # over all channels of all heads: the first head is the fastest
    theta = LRPE(2, 4, base=100.0).theta
    torch.testing.assert_close(theta.flatten(), 100 ** (-2 * torch.arange(8) / 8))
    assert theta.shape == (2, 4)
    assert "theta" in LRPE.no_weight_decay


def test_lrpe_makes_its_angles_in_fp32():
    x, lrpe = torch.randn(1, 1, 1, 8), LRPE(1, 8)
    with torch.no_grad():
        lrpe.theta.copy_(lrpe.theta.bfloat16())
    exact = lrpe.double()(x.double(), torch.tensor([[10001]]))
    actual = lrpe.bfloat16()(x.bfloat16(), torch.tensor([[10001]]))
    assert actual.dtype == torch.bfloat16
    assert (actual.double() - exact).norm() < 0.02 * exact.norm()


class Mirror(FeatureMap):
    """A user's own: relu of x and of −x, side by side."""

    def __init__(self, heads: int, size: int):
        super().__init__(heads, size)
        self.out_size = 2 * size

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat([x, -x], -1).relu()


def test_linear_attention_has_positive_features_by_default():
    """1 + ELU, as published: no weight of a token is negative."""
    mixer, stream = LinearAttention(Site(32, 2)), torch.randn(1, 9, 2, 16)
    for path in (mixer.q_features, mixer.k_features):
        y, _ = path(stream, None, ANYWHERE, None)
        torch.testing.assert_close(y, torch.where(stream > 0, 1 + stream, stream.exp()))


@pytest.mark.slow
def test_a_feature_map_by_a_user():
    def factory(site: Site) -> GatedDeltaNet:
        return GatedDeltaNet(site, qk=Features(4, norm="l2", map=Mirror))

    mixers.check_mixer(factory)
    site = Site(32, 2)
    assert factory(site).state_size() == 2 * GatedDeltaNet(site).state_size()
