"""Scores and continuations are those of the model, however they are batched and cut."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixers import GatedDeltaNet, SlidingWindowAttention
from tests.zoo.evaluation.subjects import direct
from tests.zoo.tiny import ByteTokenizer
from zoo.data import NO_LOSS, Batch
from zoo.evaluation.loaded import LoadedModel
from zoo.generation.read import AT_ONCE
from zoo.lm import H1, LanguageModel

STACK = H1(GatedDeltaNet, partial(SlidingWindowAttention, window_size=8))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(STACK, vocab_size=257, hidden_size=32, num_heads=2, num_layers=2).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that continuations differ
    return model


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("batch_tokens", [None, 1, 60])
@pytest.mark.parametrize("at_once", [16_384, 7])
def test_log_likelihoods(
    model: LanguageModel, batch_tokens: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_ONCE, "cpu", at_once)
    subject = LoadedModel("tiny", model, ByteTokenizer(), batch_tokens=batch_tokens)
    requests = [
        (tokens(length, length), tokens(answer, answer)) for length, answer in ((1, 1), (30, 4), (5, 9), (12, 1))
    ]
    with torch.no_grad():
        likeliest = model(torch.tensor([requests[3][0]]))[0][0, -1].argmax().item()
    requests.append((requests[3][0], [likeliest]))
    for actual, request in zip(subject.log_likelihoods(requests), requests, strict=True):
        expected, greedy = direct(model, *request)
        assert actual.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert actual.greedy == greedy
    assert actual.greedy


@pytest.mark.slow
@pytest.mark.parametrize("batch_tokens", [None, 1, 40])
def test_continuations(model: LanguageModel, batch_tokens: int | None) -> None:
    subject = LoadedModel("tiny", model, ByteTokenizer(), batch_tokens=batch_tokens)
    prompts = [tokens(length, length) for length in (20, 3, 20, 11)]
    for actual, prompt in zip(subject.continuations(prompts, 6), prompts, strict=True):
        expected = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                following = model(torch.tensor([expected]))[0][0, -1].argmax().item()
            if following == ByteTokenizer.eos_id:
                break
            expected.append(following)
        assert actual == expected[len(prompt) :]


def test_a_continuation_stops_before_the_end_token(model: LanguageModel) -> None:
    prompt = tokens(9)
    subject = LoadedModel("tiny", model, ByteTokenizer())
    third = subject.continuations([prompt], 3)[0][2]
    ending = ByteTokenizer()
    ending.eos_id = third
    cut = LoadedModel("tiny", model, ending).continuations([prompt], 30)[0]
    assert third not in cut
    assert cut == subject.continuations([prompt], 30)[0][: len(cut)]


def test_label_scores_of_packed_documents(model: LanguageModel) -> None:
    ids, bounds = torch.tensor([tokens(30)]), torch.tensor([0, 11, 30], dtype=torch.int32)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(30) == 10, NO_LOSS)
    subject = LoadedModel("tiny", model)
    losses, correct = subject.label_scores(Batch(ids, labels, bounds))
    for start, end in ((0, 11), (11, 30)):
        part = Batch(ids[:, start:end], labels[:, start:end])
        torch.testing.assert_close(losses[:, start:end], subject.label_scores(part).losses, rtol=1e-4, atol=1e-4)
    assert losses[0, 10] == 0
    assert not correct[0, 10]


class Live(TorchDispatchMode):
    """Notes how many bytes of tensors live at once, at most; those of a model's parameters are left out."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.known = {p.untyped_storage()._cdata for p in model.parameters()}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.sizes and storage.nbytes():
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
                    self.peak = max(self.peak, sum(self.sizes.values()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("what", ["scores", "prompts"])
def test_memory_does_not_grow_with_the_length(
    model: LanguageModel, what: str, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_ONCE, "cpu", 256)
    subject, peaks = LoadedModel("tiny", model, ByteTokenizer(), bf16=bf16), []
    for length in (256, 4096):  # one piece, and sixteen
        ids = torch.tensor([tokens(length)])
        with Live(model) as live:
            if what == "scores":
                subject.label_scores(Batch(ids, ids))
            else:
                subject.continuations(ids.tolist(), 2)
        peaks.append(live.peak)
    tokens_and_losses = 20 * (4096 - 256)
    states = 3 * 4 * sum(t.numel() for t in tree_leaves(model.init_state(1)))  # one that was read, one that is written
    converted = 2 * model.num_parameters() if bf16 and what == "prompts" else 0  # kept for the tokens to come
    assert peaks[1] - peaks[0] <= tokens_and_losses + states + converted, peaks
