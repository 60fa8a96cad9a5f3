"""States are kept, batched and continued, for every registered mixer."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import zoo
from kernels import UserError
from tests.mixers.variants import CAUSAL
from zoo.generation.generate import generate_tokens
from zoo.lm.stack import Uniform

LENGTHS = (3, 9, 1)


def model_of(name: str, seed: int = 0) -> zoo.LanguageModel:
    torch.manual_seed(seed)
    stack = Uniform(CAUSAL[name])
    return zoo.LanguageModel(
        stack, vocab_size=37, hidden_size=64, num_heads=2, num_layers=2, initializer_range=0.2
    ).eval()


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 37, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_prompts_of_different_lengths_are_continued_as_each_alone(name: str) -> None:
    model = model_of(name)
    options = {"max_new_tokens": 8, "temperature": 0.0}
    together = torch.stack(list(generate_tokens(model, prompts(), **options)), 1)
    for row, prompt in zip(together, prompts(), strict=True):
        alone = torch.stack(list(generate_tokens(model, prompt[None], **options)), 1)
        assert torch.equal(row, alone[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_states_are_saved_joined_and_taken(name: str, tmp_path) -> None:
    model = model_of(name)
    states = []
    for number, prompt in enumerate(prompts()):
        _, state = model(prompt[None], model.init_state(1))
        zoo.save_state(state, tmp_path / f"{number}.safetensors")
        states.append(zoo.load_state(model, tmp_path / f"{number}.safetensors"))
    following = torch.tensor([[5, 6], [7, 8], [9, 10]])
    expected = torch.cat(
        [model(torch.cat([prompt, new])[None])[0][:, -2:] for prompt, new in zip(prompts(), following, strict=True)]
    )
    joined = zoo.join_states(states)
    branched = zoo.take_states(joined, [2, 0, 2])  # before the joined state is consumed
    assert {len(leaf) for leaf in tree_leaves(zoo.take_states(joined, [])) if leaf.dim() > 1} == {0}
    actual, _ = model(following, joined)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    actual, _ = model(following[[2, 0, 2]], branched)
    torch.testing.assert_close(actual, expected[[2, 0, 2]], rtol=1e-4, atol=1e-4)


def test_a_state_of_another_model_is_refused(tmp_path) -> None:
    model, other = model_of("Mamba2"), model_of("SoftmaxAttention")
    zoo.save_state(model.init_state(1), tmp_path / "state.safetensors")
    with pytest.raises(UserError, match="state"):
        zoo.load_state(other, tmp_path / "state.safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        zoo.load_state(model, tmp_path / "missing.safetensors")


def test_empty_prompts_are_named() -> None:
    model = model_of("Mamba2")
    with pytest.raises(UserError, match="prompts"):
        generate_tokens(model, [torch.tensor([1]), torch.tensor([], dtype=torch.int64)], max_new_tokens=1)
    with pytest.raises(UserError, match="prompts"):
        generate_tokens(model, [], max_new_tokens=1)
