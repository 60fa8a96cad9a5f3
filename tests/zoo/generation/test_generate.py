from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

import zoo
from kernels.errors import UserError
from tests.zoo.tiny import ByteTokenizer, TinyModel
from zoo.generation.generate import generate, generate_tokens, sampling_probabilities, stream_text

LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


class Scripted(nn.Module):
    """Says one thing, whatever it is asked; its state is the number of tokens that it has read."""

    def __init__(self, script: list[int], vocab_size: int = 257) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.script, self.vocab_size, self.calls = script, vocab_size, []

    def init_state(self, batch_size, device=None, dtype=None):
        return 0

    def last_hidden(self, tokens, state=None, *, cu_seqlens=None):
        return self(tokens, state, cu_seqlens=cu_seqlens)

    def logits(self, x):
        return x

    def forward(self, tokens, state=None, *, cu_seqlens=None):
        self.calls.append(tokens.tolist())
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        logits[:, -1, self.script[len(self.calls) - 1]] = 100.0
        return logits, state + tokens.shape[1]


def test_sampling_probabilities_by_hand():
    def close(found, expected):
        torch.testing.assert_close(found, torch.tensor([expected]), atol=1e-6, rtol=0)

    close(sampling_probabilities(LOGITS), [0.1, 0.4, 0.2, 0.3])
    close(sampling_probabilities(LOGITS, top_k=2), [0.0, 4 / 7, 0.0, 3 / 7])
    close(sampling_probabilities(LOGITS, top_p=0.65), [0.0, 4 / 7, 0.0, 3 / 7])
    close(sampling_probabilities(LOGITS, top_p=0.75), [0.0, 4 / 9, 2 / 9, 3 / 9])
    halves = torch.tensor([[0.25, 0.5, 0.25]]).log()  # exact in fp32, also after a softmax
    close(sampling_probabilities(halves, top_p=0.5), [0.0, 1.0, 0.0])
    close(sampling_probabilities(LOGITS, top_p=1e-9), [0.0, 1.0, 0.0, 0.0])
    close(sampling_probabilities(LOGITS, top_k=3, top_p=0.5), [0.0, 4 / 7, 0.0, 3 / 7])
    close(sampling_probabilities(LOGITS, top_k=99, top_p=1.0), [0.1, 0.4, 0.2, 0.3])
    close(sampling_probabilities(LOGITS, temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30])
    close(sampling_probabilities(LOGITS, temperature=0), [0.0, 1.0, 0.0, 0.0])
    close(sampling_probabilities(torch.zeros(1, 3), temperature=0), [1.0, 0.0, 0.0])


def test_extreme_options_change_nothing():
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)) * 20
    assert torch.equal(sampling_probabilities(logits, top_p=1.0), sampling_probabilities(logits))
    greedy = sampling_probabilities(logits, temperature=0)
    for temperature in (1e-39, 1e-45, 1e-300, 1e-30):
        assert torch.equal(sampling_probabilities(logits, temperature=temperature), greedy)
    masked = torch.tensor([[1.0, -torch.inf, 2.0]])
    for temperature in (1e30, 1e300):
        torch.testing.assert_close(sampling_probabilities(masked, temperature), torch.tensor([[0.5, 0.0, 0.5]]))
    assert next(generate_tokens(Scripted([7]), torch.tensor([[1]]), max_new_tokens=1, temperature=1e-39)).item() == 7


def test_draws_follow_the_distribution():
    class Fixed(Scripted):
        def forward(self, tokens, state=None, *, cu_seqlens=None):
            return LOGITS.expand(tokens.shape[0], tokens.shape[1], 4), state

    drawn = next(generate_tokens(Fixed([]), torch.zeros(20000, 1, dtype=torch.long), max_new_tokens=1, top_k=2, seed=0))
    torch.testing.assert_close(
        drawn.bincount(minlength=4) / 20000, torch.tensor([0, 4 / 7, 0, 3 / 7]), atol=0.02, rtol=0
    )


def test_greedy_with_a_carried_state_is_greedy_without():
    model, tokens = TinyModel(dropout=0.5), torch.tensor([[1, 2, 3], [4, 5, 6]])
    drawn = torch.stack(list(generate_tokens(model, tokens, max_new_tokens=6, temperature=0)), 1)
    assert model.training  # and generation did not use dropout:
    model.eval()
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(drawn, tokens[:, 3:])


def test_the_prompt_is_read_in_one_call_and_then_one_token_per_call():
    model = Scripted([*b"abc"])
    assert "".join(generate(model, ByteTokenizer(), "hey", max_new_tokens=3)) == "abc"
    assert model.calls == [[[*b"hey"]], [[97]], [[98]]]


@pytest.mark.parametrize(("prompt", "read"), [("", [7]), ("ab", [7, 97, 98])])
def test_a_text_starts_as_documents_do(prompt: str, read: list[int]):
    model, tokenizer = Scripted([97, 256]), ByteTokenizer()
    tokenizer.bos_id = 7
    assert "".join(generate(model, tokenizer, prompt)) == "a"
    assert model.calls[0] == [read]


def test_it_stops_at_the_end_of_the_document():
    model = Scripted([97, 256, 98])
    assert "".join(generate(model, ByteTokenizer(), "x", temperature=0)) == "a"
    assert len(model.calls) == 2


def test_a_batch_goes_on_until_all_have_ended():
    class Two(Scripted):
        def forward(self, tokens, state=None, *, cu_seqlens=None):
            logits, state = super().forward(tokens, state)
            if len(self.calls) == 1:
                logits[0, -1, 256] = 200.0
            return logits, state

    drawn = torch.stack(
        list(generate_tokens(Two([5, 6, 256, 7]), torch.tensor([[1], [2]]), max_new_tokens=9, eos_id=256))
    )
    assert drawn.T.tolist() == [[256, 256, 256], [5, 6, 256]]


def test_a_seed_repeats_and_the_global_generator_is_not_touched():
    model, prompt = TinyModel(), torch.tensor([[1, 2]])

    def draw(seed):
        return torch.cat(list(generate_tokens(model, prompt, max_new_tokens=20, seed=seed))).tolist()

    state = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)
    assert torch.equal(torch.get_rng_state(), state)


def test_characters_of_several_tokens_come_in_one_piece():
    text = "aé漢🙂!"
    pieces = list(generate(Scripted([*text.encode()]), ByteTokenizer(), "x", max_new_tokens=len(text.encode())))
    assert pieces == ["a", "é", "漢", "🙂", "!"]


def test_an_incomplete_character_at_the_end_is_left_out():
    assert list(stream_text(ByteTokenizer(), [], [*b"ab", *"漢".encode()[:2]])) == ["a", "b"]
    assert list(stream_text(ByteTokenizer(), [*"é".encode()], [])) == []


def test_bytes_that_are_no_character_do_not_stop_the_stream():
    assert "".join(stream_text(ByteTokenizer(), [], [0xFF, *b"ok"])) == "\ufffdok"


def test_decoders_that_treat_a_first_token_otherwise():
    vocabulary = {"▁a": 0, "▁b": 1, "c": 2}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assert words.decode([0, 1]) == "a b"
    assert list(stream_text(words, [0], [1, 2, 0, 1])) == [" b", "c", " a", " b"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
    ],
)
def test_arguments_out_of_range(option, value):
    with pytest.raises(UserError, match=rf"{option} is .*, but must be"):
        generate(TinyModel(), ByteTokenizer(), "x", **{option: value})


def test_prompts_need_a_token():
    with pytest.raises(UserError, match="at least 1 token"):
        generate_tokens(TinyModel(), torch.zeros(2, 0, dtype=torch.long), max_new_tokens=1)


@pytest.mark.slow
def test_special_tokens_of_a_prompt_are_parsed_on_request(finished: Path):
    model, tokenizer = zoo.load(finished / "runs" / "done"), zoo.load_tokenizer(finished / "runs" / "done")
    seen: list[torch.Tensor] = []
    model.embeddings.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))  # type: ignore[union-attr]
    for special in (False, True):
        seen.clear()
        model.generate("a<eos>b", max_new_tokens=1, special_tokens=special)
        assert (tokenizer.eos_id in seen[0].flatten().tolist()) == special
