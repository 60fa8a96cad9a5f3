import torch
import torch.nn.functional as F

from mixers import Mamba2, Site
from mixers.base import Streams

SITE = Site(hidden_size=64, num_heads=4)


def test_initial_ranges():
    mixer = Mamba2(Site(2048, 16), head_dim=8, state_dim=4)
    assert torch.equal(mixer.D, torch.ones(512))
    assert not mixer.v_features.bias.any()


def test_sizes_are_its_own():
    mixer = Mamba2(Site(128, 3))  # the model's number of heads does not matter
    assert (mixer.num_heads, mixer.num_key_heads, mixer.key_size, mixer.value_size) == (4, 1, 128, 64)
    assert mixer.state_size() == 4 * 128 * 64
    assert mixer.init_state(3).matrix.shape == (3, 4, 128, 64)


def test_a_number_of_heads_says_the_width():
    mixer = Mamba2(SITE, num_heads=6, head_dim=10, state_dim=8, num_groups=2)
    assert (mixer.num_heads, mixer.out_proj.in_features) == (6, 60)


def test_dt_is_not_clamped():
    mixer = Mamba2(SITE, head_dim=16, state_dim=8)
    raw = torch.linspace(-30, 30, 80).view(1, 10, 8)
    s = mixer.gates(Streams(raw, raw, raw, raw))
    torch.testing.assert_close(s.beta, F.softplus(raw + mixer.decay.dt_bias))
    torch.testing.assert_close(s.log_decay, -mixer.decay.A_log.exp() * s.beta)
    assert s.beta.max() > 25
