"""The norm between the recurrence and the output projection."""

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
    given = [entry.mixer(Site(64, 2, layer=1, num_layers=2), **entry.tiny, norm_eps=eps) for eps in (1e-5, 1e12)]
    assert outputs(given[0]).abs().max() > 1e-3
    assert outputs(given[1]).abs().max() < 1e-4


def test_gated_deltanet_has_it_in_its_output():
    base = ["gated_deltanet.yaml", "model.vocab_size=64", "model.hidden_size=64", "model.num_heads=2"]
    output = {"class_path": "GatedRMSNorm", "init_args": {"eps": 1e12}}
    overlay = {"model": {"num_layers": 1, "stack": {"mixer": {"mixer": {"output": output}}}}}
    (mixer,) = zoo.build(*base, str(overlay).replace("'", '"')).mixers
    assert outputs(mixer).abs().max() < 1e-4
