"""What stays in fp32 when a model becomes bf16."""

from collections.abc import Iterator

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mixers
import zoo
from mixers import Site
from mixers.features import FeaturePath
from mixers.norm import HeadNorm
from zoo.data.batch import Batch
from zoo.lm.stack import Uniform
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

from .variants import CAUSAL, REGISTERED

# and the weights of norms and bounds, and biases of β
FINE = {"A_log", "dt_bias", "D", "theta", "centre", "mix", "decay_bias", "rate_bias", "k_k", "k_a", "r_k"}


def fine(module: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of the parameters that bf16 is too coarse for, found without asking the modules."""
    norms = (mixers.RMSNorm, mixers.GatedRMSNorm, HeadNorm, mixers.LowerBounds)
    return {
        f"{prefix}.{name}": parameter.dtype
        for prefix, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False)
        if isinstance(part, norms) or name in FINE
    }


def model(name: str) -> zoo.LanguageModel:
    return zoo.LanguageModel(Uniform(CAUSAL[name]), vocab_size=17, hidden_size=64, num_heads=2, num_layers=2)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cast_model_keeps_what_needs_digits(name: str):
    kept = model(name)
    with torch.no_grad():
        for parameter in kept.parameters():
            parameter.add_(1e-4)
    before = {key: value.clone() for key, value in kept.state_dict().items()}
    kept.to(torch.bfloat16)
    assert set(fine(kept).values()) == {torch.float32}
    for key, dtype in fine(kept).items():
        assert dtype == torch.float32
        assert torch.equal(kept.state_dict()[key], before[key]), key  # not by way of bf16
    for part in kept.modules():
        if isinstance(part, nn.Linear | nn.Embedding | FeaturePath):
            assert all(p.dtype == torch.bfloat16 for p in part.parameters(recurse=False))
    tokens = torch.tensor([[1, 2, 3]])
    logits, state = kept(tokens, kept.init_state(1))
    assert logits.dtype == kept(tokens)[0].dtype == torch.bfloat16
    for mixer in kept.mixers:
        for history in getattr(mixer.init_state(1), "histories", ()):
            assert history.dtype == torch.bfloat16
    assert kept(tokens[:, :1], state)[0].dtype == torch.bfloat16
    assert set(fine(kept.double()).values()) == {torch.float64}


@pytest.fixture
def default_bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_mixer_built_in_bf16_is_as_if_cast(name: str, default_bf16: None):
    """As by Lightning's `module_init_context` of bf16-true, or by transformers."""
    built = REGISTERED[name](Site(64, 2))
    torch.set_default_dtype(torch.float32)
    cast = REGISTERED[name](Site(64, 2)).bfloat16()
    assert {n: p.dtype for n, p in built.named_parameters()} == {n: p.dtype for n, p in cast.named_parameters()}
    y, _ = built(torch.randn(1, 5, 64, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


def test_assigned_weights_stay_in_fp32():
    mixer = mixers.Mamba2(Site(64, 2), head_dim=16, state_dim=16)
    half = {name: tensor.bfloat16() for name, tensor in mixer.state_dict().items()}
    mixer.load_state_dict(half, assign=True)
    assert (mixer.D.dtype, mixer.in_proj.weight.dtype) == (torch.float32, torch.bfloat16)


def test_gradients_stay_with_their_parameters():
    norm = mixers.RMSNorm(4)
    norm(torch.randn(3, 4)).sum().backward()
    before = norm.weight.grad.clone()
    norm.bfloat16()
    assert torch.equal(norm.weight.grad, before)


class Same(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(9) + index


def collate(rows: list[torch.Tensor]) -> Batch:
    tokens = torch.stack(rows)
    return Batch(tokens[:, :-1], tokens[:, 1:], None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fused"), [*((name, None) for name in CAUSAL), ("Mamba2", False)])
def test_a_training_step_in_bf16(name: str, fused: bool | None, tmp_path):
    learner = Pretraining(model(name), Optimisation(warmup_steps=0, learning_rate=1e-3, fused=fused))
    with torch.no_grad():  # an output projection that starts at zero has no gradients before it
        for parameter in learner.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    before = {key: value.clone() for key, value in learner.model.state_dict().items()}
    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        precision="bf16-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(learner, DataLoader(Same(), batch_size=2, collate_fn=collate))
    after = learner.model.state_dict()
    assert set(fine(learner.model).values()) == {torch.float32}
    assert learner.model.embeddings.weight.dtype == torch.bfloat16
    moved = [key for key in fine(learner.model) if not torch.equal(after[key], before[key])]
    assert len(moved) >= 0.7 * len(fine(learner.model)), "steps of 1e-3 from 1 would be lost in bf16"
