import torch
import torch.nn.functional as F

from mixers import Mamba1, Site


def test_initial_ranges():
    mixer = Mamba1(Site(512, 4))
    dt = F.softplus(mixer.dt_bias)
    assert 1e-3 * (1 - 1e-4) <= dt.min() < 1.5e-3
    assert 0.07 < dt.max() <= 0.1 * (1 + 1e-4)
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(1024, 16))  # S4D-real
    assert torch.equal(mixer.D, torch.ones(1024))


def test_sizes_are_its_own():
    mixer = Mamba1(Site(72, 5))  # the model's number of heads does not matter
    assert mixer.x_proj.widths == {"dt": 5, "B": 16, "C": 16}  # 72 / 16, rounded up
    assert mixer.state_size() == 144 * 16
    state = mixer.init_state(3)
    assert state.h.shape == (3, 144, 16)
    assert state.histories[0].shape == (3, 3, 144)
    mixer = Mamba1(Site(72, 5), expand=1, state_dim=4, conv=2, dt_rank=7)
    assert mixer.x_proj.widths == {"dt": 7, "B": 4, "C": 4}
    assert mixer.state_size() == 72 * 4


def test_rates_do_not_decay():
    assert set(Mamba1.no_weight_decay) == {"A_log", "D"}  # dt_bias is a vector, and none of those decays
