"""Names and sizes of models, as tables and rows of results have them."""

import pytest

import zoo
from zoo.lm.size_table import mixer_names, parameters_without_embeddings

SMALL = ("model.vocab_size=64", "model.hidden_size=32", "model.num_heads=2", "model.num_layers=3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gla.yaml"], "GLA"),
        (["gla.yaml", "ablate/expand_4.yaml"], "GLA×4"),
        (["gdn_h2.yaml", "model.stack.second.factor=2"], "Mamba2+GatedDeltaNet×2+SlidingWindowAttention"),
        (["gdn_h2.yaml", "model.num_layers=6"], "Mamba2+GatedDeltaNet+SlidingWindowAttention"),
    ],
)
def test_mixers_are_named_once_with_their_expansion(arguments: list[str], expected: str):
    assert mixer_names(zoo.build(arguments[0], *SMALL, *arguments[1:], device="meta")) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_neither_embedding_nor_head_counts(tied: bool):
    build = [*SMALL, f"model.tie_embeddings={str(tied).lower()}"]
    model = zoo.build("transformer.yaml", *build, device="meta")
    larger = zoo.build("transformer.yaml", *build, "model.vocab_size=128", device="meta")
    assert parameters_without_embeddings(model) == parameters_without_embeddings(larger)
    assert model.num_parameters() - parameters_without_embeddings(model) == 64 * 32 * (1 if tied else 2)
