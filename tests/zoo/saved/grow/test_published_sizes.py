"""Parameters and states of the paper's models (StateX, table 2), built without memory."""

from typing import Any

import pytest

from zoo.config import from_config, parse, to_dict
from zoo.lm import LanguageModel
from zoo.saved.grow.enlarge import chosen_layers, grown_config

GLA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 4,
    "intermediate_size": 5632,
    "stack": {"class_path": "Uniform", "init_args": {"mixer": "GLA"}},
}
MAMBA2: dict[str, Any] = {
    "vocab_size": 50288,
    "hidden_size": 2048,
    "num_layers": 48,
    "mlp": None,
    "tie_embeddings": True,
    "stack": {"class_path": "Uniform", "init_args": {"mixer": "Mamba2"}},
}


def built(model: dict[str, Any]) -> LanguageModel:
    return from_config(parse({"model": model}), "meta")


def grown(model: dict[str, Any], layers: int | list[int], way: str | None = None) -> LanguageModel:
    before, complete = built(model), to_dict(parse({"model": model}))["model"]
    config, _ = grown_config(complete, before, chosen_layers(before.mixers, layers, way), "reinit", None)
    return built(config)


def changed(model: LanguageModel) -> list[int]:
    sizes = [mixer.state_size() for mixer in model.mixers]
    return [layer for layer, size in enumerate(sizes) if size > min(sizes)]


def test_gla():
    before, after = built(GLA), grown(GLA, 4)
    assert (before.num_parameters(), before.state_size()) == (1_365_514_240, 12_582_912)
    assert after.state_size() == 18_874_368
    assert changed(after) == [0, 6, 12, 18]
    assert after.mixers[0].init_state(1, "meta").matrix.shape == (1, 1, 1024, 2048)
    # only the norm at the output, one weight per channel of a head, gets more of them
    assert after.num_parameters() - before.num_parameters() == 4 * (2048 - 512)


@pytest.mark.slow
def test_mamba2_with_the_layers_of_the_text_and_with_those_of_the_printed_state():
    """1.350B parameters are those of four layers, as section 5.5 says; the state of table 2 is that of eight."""
    before, four, eight = built(MAMBA2), grown(MAMBA2, 4), grown(MAMBA2, 8)
    assert (before.num_parameters(), before.state_size()) == (1_343_757_312, 25_165_824)
    assert (four.num_parameters(), four.state_size()) == (1_350_064_128, 31_457_280)
    assert (eight.num_parameters(), eight.state_size()) == (1_356_370_944, 37_748_736)
    assert changed(four) == [0, 12, 24, 36]
    assert changed(eight) == [0, 6, 12, 18, 24, 30, 36, 42]
    assert four.mixers[0].init_state(1, "meta").matrix.shape == (1, 64, 512, 64)


def test_layers_of_ones_own_and_subheads():
    after = grown(GLA, [20, 3], "expand")
    assert changed(after) == [3, 20]
    assert after.mixers[3].init_state(1, "meta").matrix.shape == (1, 16, 256, 512)


@pytest.mark.slow
def test_numbers_that_do_not_divide_the_depth():
    assert changed(grown(GLA, 5)) == [0, 4, 9, 14, 19]
    assert len(grown(GLA, 24).mixers) == 24
