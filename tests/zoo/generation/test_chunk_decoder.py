"""Decoding in deterministic mode: the logits and log-probabilities that training computes, to the bit."""

import pytest
import torch
from torch import Tensor

import kernels
from tests.mixers.variants import CAUSAL
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.generation.generate import WORTH_CAPTURING, generate_tokens, sample_tokens
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform

pytest_plugins = "tests.zoo.generation.pretended"
pytestmark = pytest.mark.usefixtures("highest")

LENGTHS = (3, 63, 64, 70)
NEW = 4


def model(name: str, device: str = "cpu", hidden_size: int = 32) -> LanguageModel:
    torch.manual_seed(0)
    built = LanguageModel(Uniform(CAUSAL[name]), vocab_size=19, hidden_size=hidden_size, num_heads=2, num_layers=2)
    return built.to(device).train()


def prompts(lengths: tuple[int, ...] = LENGTHS, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(19, (length,), generator=generator).to(device) for length in lengths]


def trained(lm: LanguageModel, tokens: Tensor, new: int) -> Tensor:
    """The log-probabilities of the last tokens, as the loss of training has them: with gradients, and a batch."""
    x, _ = lm.last_hidden(tokens[None, :-1].expand(2, -1))
    assert x.requires_grad
    return -lm.token_losses(tokens[None, :-1], tokens[None, 1:]).losses[0, -new:]


def check(lm: LanguageModel, given: list[Tensor], new: int = NEW, tolerance: float = 1e-5) -> None:
    drawn = [*sample_tokens(lm, given, max_new_tokens=new, seed=2)]
    for row, prompt in enumerate(given):
        tokens = torch.cat([prompt, *(step[row : row + 1] for step, _ in drawn)])
        scores = torch.stack([score[row] for _, score in drawn])
        assert torch.equal(scores, trained(lm, tokens, new))
        alone = torch.stack([score for _, score in sample_tokens(lm, [prompt], max_new_tokens=1, seed=3)])
        logits, _ = lm(prompt[None])
        expected = logits[0, -1].detach().float().log_softmax(-1)
        assert alone.shape == (1, 1)
        torch.testing.assert_close(scores[0], expected[tokens[len(prompt)]], rtol=tolerance, atol=tolerance)


OFTEN = ("GatedDeltaNet", "SlidingWindowAttention")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in OFTEN else pytest.mark.slow) for x in CAUSAL])
def test_sampled_tokens_have_the_log_probabilities_of_training(name: str):
    with kernels.deterministic():
        check(model(name), prompts())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GLA", "GatedDeltaNet", "Mamba2", "HGRN2", "SlidingWindowAttention"])
def test_in_bf16_on_a_gpu(name: str):
    """The continuation is long enough for a CUDA graph to pay off."""
    with kernels.deterministic(), torch.autocast("cuda", torch.bfloat16):
        check(model(name, "cuda"), prompts(device="cuda"), new=WORTH_CAPTURING + 4, tolerance=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GatedDeltaNet", "KDA", "GLA"])
def test_heads_of_128_channels_on_a_gpu(name: str):
    """As in large models, for which Hopper has other kernels; all sequences reach the end of a chunk."""
    with kernels.deterministic(), torch.autocast("cuda", torch.bfloat16):
        check(model(name, "cuda", hidden_size=256), prompts(device="cuda"), new=70, tolerance=1e-2)


def test_the_mode_is_that_of_the_call_and_stays_inside():
    lm, given = model("GLA"), prompts((5,))
    with kernels.deterministic():
        tokens = generate_tokens(lm, given, max_new_tokens=3, seed=1)
    first = next(tokens)
    assert not kernels.is_deterministic()
    with kernels.deterministic():
        expected = [*generate_tokens(lm, given, max_new_tokens=3, seed=1)]
    assert torch.equal(torch.stack([first, *tokens]), torch.stack(expected))


def test_by_default_log_probabilities_are_nearly_those():
    lm, given = model("GLA"), prompts()
    drawn = [*sample_tokens(lm, given, max_new_tokens=NEW, seed=2)]
    tokens = torch.cat([given[3], *(step[3:] for step, _ in drawn)])
    scores = torch.stack([score[3] for _, score in drawn])
    torch.testing.assert_close(scores, trained(lm, tokens, NEW), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["GLA", "SoftmaxAttention"])
def test_a_captured_call_works_on_the_same_memory(name: str, captures: list[torch.device]):
    """As a graph would run it, unless the state grows: then it is not captured."""
    lm, given, graphs = model(name).eval(), prompts(), DecodingGraphs()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(19, (70, len(given)), generator=generator)
    results = []
    with kernels.deterministic():
        for owner in (None, graphs, graphs):
            decoder = ChunkDecoder(lm, given, graphs=owner)
            results.append(torch.stack([decoder().clone(), *(decoder(step).clone() for step in tokens)], 1))
            decoder.close()
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])
    assert len(captures) == 2 * (name == "GLA")  # with the state after a chunk, and without
