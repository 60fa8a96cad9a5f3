"""Blocks with the norms before or after their layers, and with other norms."""

import pytest
import torch
from torch import Tensor

import zoo
from mixers import ZeroCentredRMSNorm
from zoo.lm import Block, PostNormBlock

SIZES = ("model.vocab_size=64", "model.hidden_size=32", "model.num_heads=2", "model.num_layers=4")
PATTERN = """
{class_path: Pattern, init_args: {pattern: GGA, mixers: {G: GatedDeltaNet, A: SoftmaxAttention}, post_norm: A}}
"""


@pytest.fixture
def model() -> zoo.LanguageModel:
    torch.manual_seed(0)
    built = zoo.build("transformer.yaml", *SIZES, f"model.stack={PATTERN.strip()}", "model.norm=ZeroCentredRMSNorm")
    with torch.no_grad():
        for part in built.modules():
            if isinstance(part, ZeroCentredRMSNorm):
                part.weight.normal_(std=0.3)
    return built


def by_hand(model: zoo.LanguageModel, tokens: Tensor) -> Tensor:
    """The logits of a model whose layer 2 has its norms after mixer and MLP, the others before."""

    def norm(part: ZeroCentredRMSNorm, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + part.weight)

    x = model.embeddings(tokens)
    for layer, block in enumerate(model.layers):
        if layer == 2:
            x = x + norm(block.mixer_norm, block.mixer(x)[0])
            x = x + norm(block.mlp_norm, block.mlp(x))
        else:
            x = x + block.mixer(norm(block.mixer_norm, x))[0]
            x = x + block.mlp(norm(block.mlp_norm, x))
    return norm(model.norm, x) @ model.lm_head.weight.T


def test_norms_before_and_after_in_one_model(model: zoo.LanguageModel):
    assert [type(block) for block in model.layers] == [Block, Block, PostNormBlock, Block]
    tokens = torch.randint(64, (2, 11))
    logits, expected = model(tokens)[0], by_hand(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    actual, wanted = (torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (logits, expected))
    for (name, _), a, b in zip(model.named_parameters(), actual, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())), name


MULTIPLIERS = {"embedding": 12.0, "residual": 0.22, "logits_scaling": 3.0}


def test_multipliers_are_those_of_weights():
    torch.manual_seed(0)
    settings = (f"model.multipliers.{name}={value}" for name, value in MULTIPLIERS.items())
    eps = "model.norm_eps=1e-2"  # so that the size of the residual stream matters
    override = (*SIZES, f"model.stack={PATTERN.strip()}", eps, "model.norm=LayerNorm")
    scaled, plain = zoo.build("transformer.yaml", *override, *settings), zoo.build("transformer.yaml", *override)
    assert scaled.state_dict().keys() == plain.state_dict().keys()
    weights = {name: part.clone() for name, part in scaled.state_dict().items()}
    for name, part in weights.items():
        post_norm = name.startswith("layers.2.")
        last = ("mixer_norm.weight", "mixer_norm.bias", "mlp_norm.weight", "mlp_norm.bias")
        outputs = last if post_norm else ("o_proj.weight", "down_proj.weight")
        if name.startswith("layers") and name.endswith(outputs):
            part *= MULTIPLIERS["residual"]
    weights["embeddings.weight"] *= MULTIPLIERS["embedding"]
    weights["lm_head.weight"] /= MULTIPLIERS["logits_scaling"]
    plain.load_state_dict(weights)
    tokens, labels = torch.randint(64, (2, 2, 11))
    torch.testing.assert_close(scaled(tokens)[0], plain(tokens)[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scaled.loss(tokens, labels), plain.loss(tokens, labels))
    losses = scaled.token_losses(tokens, labels).losses
    torch.testing.assert_close(losses, plain.token_losses(tokens, labels).losses, rtol=1e-4, atol=1e-6)
    for name in MULTIPLIERS:
        one = zoo.build("transformer.yaml", *override, f"model.multipliers.{name}=2")
        one.load_state_dict(scaled.state_dict())
        assert not torch.allclose(one(tokens)[0], scaled(tokens)[0], rtol=1e-2)


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_multipliers_are_positive(name: str):
    with pytest.raises(zoo.UserError, match=f"{name}: 0.0 must be a finite number above 0"):
        zoo.build("transformer.yaml", *SIZES, f"model.multipliers.{name}=0")


def test_zero_centred_norms_start_at_zero():
    built = zoo.build("transformer.yaml", *SIZES, "model.norm=ZeroCentredRMSNorm", "model.norm_eps=0.1")
    norms = [part for part in built.modules() if isinstance(part, ZeroCentredRMSNorm)]
    assert len(norms) == 2 * 4 + 1
    assert all(part.eps == 0.1 and not part.weight.any() for part in norms)


@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_are_told_what_to_compute_again(recompute: bool):
    built = zoo.build("transformer.yaml", *SIZES, f"model.recompute={str(recompute).lower()}")
    assert [block.recompute for block in built.layers] == [recompute] * 4


@pytest.mark.gpu
def test_what_is_not_computed_again_is_kept():
    tokens, kept, gradients = torch.randint(64, (2, 1000), device="cuda"), [], []
    for recompute in ("true", "true", "false"):  # the first pass also allocates what the GPU's libraries work in
        torch.manual_seed(0)
        built = zoo.build("gated_deltanet.yaml", *SIZES, f"model.recompute={recompute}").cuda()
        before = torch.cuda.memory_allocated()
        loss = built(tokens)[0].square().mean()
        kept.append(torch.cuda.memory_allocated() - before)
        gradients.append(torch.autograd.grad(loss, list(built.parameters())))
    assert kept[2] > 1.1 * kept[1]
    assert all(torch.equal(repeated, saved) for repeated, saved in zip(*gradients[1:], strict=True))
