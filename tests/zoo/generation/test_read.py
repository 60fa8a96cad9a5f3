from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mixers import Expanded, GatedDeltaNet, Mamba2, SlidingWindowAttention, SoftmaxAttention
from zoo.generation.read import AT_ONCE, read
from zoo.lm import H2, LanguageModel, Uniform

HYBRID = H2(Mamba2, Expanded(mixer=GatedDeltaNet, factor=2), partial(SlidingWindowAttention, window_size=8))


@pytest.fixture(scope="module", params=[Uniform(SoftmaxAttention), HYBRID], ids=["attention", "hybrid"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(request.param, vocab_size=50, hidden_size=32, num_heads=2, num_layers=3).eval()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[40, 40, 40], [40, 3, 17]], ids=["equal", "different"])
@pytest.mark.parametrize("at_once", [16_384, 60, 9])
def test_pieces_make_no_difference(
    model: LanguageModel, lengths: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(AT_ONCE, "cpu", at_once)
    prompts = [torch.randint(50, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    logits, state = read(model, prompts)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            alone, _ = model(prompt[None])
        torch.testing.assert_close(logits[row], alone[0, -1], rtol=1e-3, atol=1e-4)
    # the states continue as one batch
    following = torch.tensor([[1]] * len(prompts))
    with torch.no_grad():
        continued, _ = model(following, state)
        for row, prompt in enumerate(prompts):
            alone, _ = model(torch.cat([prompt, following[row]])[None])
            torch.testing.assert_close(continued[row, -1], alone[0, -1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_model_never_sees_more_tokens_at_once(model: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(AT_ONCE, "cpu", 64)
    sizes = []
    last_hidden = model.last_hidden
    monkeypatch.setattr(
        model,
        "last_hidden",
        lambda tokens, *given, **more: sizes.append(tokens.numel()) or last_hidden(tokens, *given, **more),
    )
    logits, state = read(model, [torch.ones(1000, dtype=torch.int64)] * 2)
    assert max(sizes) <= 64
    assert sum(sizes) == 2000
    assert logits.shape == (2, 50)
    assert tree_leaves(state)
