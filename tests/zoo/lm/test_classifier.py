"""Models that label whole sequences, of tokens or of patches of images."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kernels
import zoo
from kernels import UserError
from kernels.flops import as_computed
from mixers import Bidirectional, GatedDeltaNet
from zoo.generation.generate import generate_tokens
from zoo.lm import Classifier, Patches, Uniform
from zoo.train.metrics import token_losses

HIDDEN = 32


def build(mixer=Bidirectional, pooling: str = "mean", **arguments) -> zoo.LanguageModel:
    torch.manual_seed(0)
    head = partial(Classifier, num_classes=5, pooling=pooling)
    sizes = {"vocab_size": 11, "hidden_size": HIDDEN, "num_heads": 2, "num_layers": 2, "initializer_range": 0.2}
    return zoo.LanguageModel(Uniform(mixer), **{**sizes, "head": head, **arguments})


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_one_prediction_for_each_sequence():
    model = build()
    logits, state = model(tokens(3, 9))
    assert logits.shape == (3, 1, 5)
    assert state is None
    assert model.lm_head is None
    assert model.head.num_classes == 5


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_packed_sequences_are_pooled_separately(pooling: str):
    model, row = build(pooling=pooling).double(), tokens(1, 12)
    packed, _ = model(row, cu_seqlens=torch.tensor([0, 5, 6, 12], dtype=torch.int32))
    alone = [model(row[:, start:stop])[0] for start, stop in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@torch.no_grad()
def test_what_is_pooled():
    x = torch.randn(2, 7, HIDDEN)
    assert torch.equal(Classifier(HIDDEN, pooling="mean").pool(x)[:, 0], x.mean(1))
    assert torch.equal(Classifier(HIDDEN, pooling="last").pool(x)[:, 0], x[:, -1])


def test_pooling_in_deterministic_mode_is_that_of_one_sequence():
    head, x = Classifier(HIDDEN, pooling="mean"), torch.randn(3, 7, HIDDEN)
    with kernels.deterministic():
        pooled = head.pool(x)
        packed = head.pool(x[:2].reshape(1, 14, HIDDEN), torch.tensor([0, 7, 14]))
        assert torch.equal(head.pool(x[1:2]), pooled[1:2])
    assert pooled.shape == (3, 1, HIDDEN)
    assert torch.equal(packed[0], pooled[:2, 0])
    torch.testing.assert_close(pooled, head.pool(x))


@pytest.mark.parametrize("packed", [False, True])
def test_losses_are_those_of_the_logits(packed: bool):
    model = build()
    row, bounds = (tokens(1, 12), torch.tensor([0, 5, 12])) if packed else (tokens(2, 6), None)
    labels = torch.tensor([[3, 1]]) if packed else torch.tensor([[3], [1]])
    logits, _ = model(row, cu_seqlens=bounds)
    expected = token_losses(logits, labels)
    torch.testing.assert_close(model.loss(row, labels, bounds), expected.sum())
    with torch.no_grad():
        actual = model.token_losses(row, labels, cu_seqlens=bounds)
    torch.testing.assert_close(actual.losses, expected)
    assert torch.equal(actual.correct, logits.argmax(-1) == labels)
    model.loss(row, labels, bounds).backward()
    assert model.head.weight.grad.any()


def test_patches_take_the_place_of_tokens():
    model = build(inputs=partial(Patches, patch_size=2, channels=3), vocab_size=None)
    images = torch.randn(2, 9, 12)
    assert model(images)[0].shape == (2, 1, 5)
    assert model.embeddings is None
    torch.testing.assert_close(model.inputs(images), images @ model.inputs.proj.weight.T + model.inputs.proj.bias)
    language = build(mixer=GatedDeltaNet, inputs=partial(Patches, patch_size=2, channels=3), head=None)
    assert language(images)[0].shape == (2, 9, 11)  # patches may be labelled one by one, too


def test_flops_are_what_is_executed():
    for arguments, batch in (
        ({}, tokens(1, 64)),
        ({"inputs": partial(Patches, patch_size=2, channels=1), "vocab_size": None}, torch.randn(1, 64, 4)),
    ):
        model = build(**arguments)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(batch)
        with as_computed():
            assert model.flops(64) == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_it_can_be_made_on_meta():
    with torch.device("meta"):
        empty = build(inputs=partial(Patches, patch_size=2, channels=1))
    empty.to_empty(device="cpu").reset_parameters()
    assert all(parameter.isfinite().all() for parameter in empty.parameters())
    assert not empty.inputs.proj.bias.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": None}, "^stack: Bidirectional is not causal and would see the tokens it predicts; give the model"),
        ({"head": None, "mixer": GatedDeltaNet, "position": Bidirectional}, "^stack: Bidirectional is not causal"),
        ({"tie_embeddings": True}, "^tie_embeddings: true needs token embeddings and logits"),
        ({"vocab_size": None}, "^vocab_size: null means the tokenizer's; a model without a tokenizer needs a number$"),
        ({"pooling": "first"}, "^pooling: 'first' is not one of mean, last$"),
        ({"head": partial(Classifier, num_classes=1)}, "^num_classes: 1 must be at least 2$"),
        ({"inputs": partial(Patches, patch_size=0)}, "^patch_size: 0 must be at least 1$"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        build(**arguments)


def test_what_a_classifier_cannot_do_is_refused():
    model = build(mixer=GatedDeltaNet)
    with pytest.raises(UserError, match=r"^generate: a model with the head Classifier labels sequences and"):
        generate_tokens(model, tokens(1, 4), max_new_tokens=3)
    with pytest.raises(UserError, match=r"^state: a model with the head Classifier reads whole sequences only$"):
        model(tokens(1, 4), model.init_state(1))
    with pytest.raises(UserError, match=r"^state: Bidirectional needs whole sequences"):
        build().init_state(1)
    for method in (model.loss, model.token_losses):
        with pytest.raises(
            UserError, match=r"^labels: .* \(1, 4\), but this model with the head Classifier makes \(1, 1\)"
        ):
            method(tokens(1, 4), tokens(1, 4))
    with pytest.raises(UserError, match=r"^labels: .* \(1, 1\), but this language model makes \(1, 4\) predictions"):
        build(mixer=GatedDeltaNet, head=None).loss(tokens(1, 4), tokens(1, 1))
