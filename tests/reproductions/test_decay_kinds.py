"""Log decays of benchmarks."""

import pytest
import torch

from reproductions.decay_kinds import KINDS, MODELS, SHARES, log_decays, recorded

SIZE = (2, 500, 3, 32)  # B, T, H, K


def drawn(kind: str, model: str = "kda") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return log_decays(kind, model, SIZE, lambda *size: torch.randn(*size, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_log_decays_are_finite_and_not_positive(kind: str):
    actual = drawn(kind)
    assert actual.shape == SIZE
    assert actual.dtype == torch.float32
    assert actual.isfinite().all()
    assert (actual <= 0).all()


def test_kinds_differ_in_strength():
    medians = {kind: drawn(kind).median().item() for kind in KINDS}
    assert -0.1 < medians["gentle"] < -0.02
    assert drawn("bounded").amin() > -5
    assert -3 < medians["bounded"] < -2
    # softplus decays before training: A between 1 and 16, steps from 0.001 to 0.1
    assert -2 < medians["initial"] < -0.01


@pytest.mark.parametrize("model", MODELS.values())
def test_recorded_decays_have_the_quantiles_of_the_layers(model: str):
    """The heads are drawn from the first, the middle and the last layer."""
    layers, actual = recorded()[model]["quantiles"], drawn("recorded", model)
    for head, layer in enumerate((0, round((len(layers) - 1) / 2), len(layers) - 1)):
        ordered = actual[:, :, head].flatten().sort().values
        for share in (0.1, 0.5, 0.9):
            expected = layers[layer][SHARES.index(share)]
            assert ordered[int(share * len(ordered))] == pytest.approx(expected, rel=0.1), (head, share)


def test_recorded_models_have_every_quantile_in_order():
    for name, model in recorded().items():
        assert len(model["steep_chunks"]) == len(model["quantiles"]), name
        for layer in model["quantiles"]:
            assert len(layer) == len(SHARES)
            assert layer == sorted(layer)
            assert layer[-1] <= 0
