import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mixers
import zoo
from kernels import UserError
from mixers import Site, TokenMixer
from mixers.base import dense_flops
from zoo.lm.stack import Uniform
from zoo.train.metrics import token_losses

VOCAB, HIDDEN, LENGTH = 61, 32, 23


def build(*overrides: str, config: str = "gdn_h2.yaml", device: str | None = None) -> zoo.LanguageModel:
    """An H2 model of three layers whose window is shorter than the sequences here."""
    sizes = (f"model.hidden_size={HIDDEN}", "model.num_heads=2", "model.num_layers=3", f"model.vocab_size={VOCAB}")
    window = ("model.stack.third.window_size=5",) if config == "gdn_h2.yaml" else ()
    return zoo.build(config, *sizes, *window, *overrides, device=device)


@pytest.fixture(scope="module")
def model() -> zoo.LanguageModel:
    torch.manual_seed(0)
    return build("model.initializer_range=0.2").double().eval()  # large weights: every part has a say in the logits


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH))


class Sharing(TokenMixer):
    """Every layer uses the projection of the lowest one."""

    def __init__(self, site: Site):
        super().__init__()
        self.proj = nn.Linear(site.hidden_size, site.hidden_size)

    def forward(self, x, state=None, *, cu_seqlens=None):
        return self.proj(x), state

    def share(self, below):
        if below:
            self.proj = below[0].proj


def test_logits_without_and_with_a_state(model: zoo.LanguageModel, tokens: Tensor):
    logits, state = model(tokens)
    assert logits.shape == (2, LENGTH, VOCAB)
    assert state is None
    assert len(model(tokens, model.init_state(2))[1]) == 3


@torch.no_grad()
def test_whole_is_pieces(model: zoo.LanguageModel, tokens: Tensor):
    whole, _ = model(tokens)
    state, pieces = model.init_state(2), []
    for start, end in ((0, 1), (1, 9), (9, 10), (10, LENGTH)):  # steps of one token take another path
        logits, state = model(tokens[:, start:end], state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    forgotten, _ = model(tokens[:, 10:])
    assert not torch.allclose(forgotten, whole[:, 10:], atol=1e-2)  # the state was needed


@torch.no_grad()
def test_packed_is_separate(model: zoo.LanguageModel):
    bounds = [0, 4, 4, 12, LENGTH]  # one document is empty
    row = torch.randint(VOCAB, (1, LENGTH))
    packed, _ = model(row, cu_seqlens=torch.tensor(bounds))
    separate = [model(row[:, start:end])[0] for start, end in pairwise(bounds) if end > start]
    torch.testing.assert_close(packed, torch.cat(separate, 1))
    assert not torch.allclose(packed, model(row)[0], atol=1e-2)  # the boundaries mattered


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_meta_can_be_filled(tied: bool, tokens: Tensor):
    override = f"model.tie_embeddings={str(tied).lower()}"
    real, empty = build(override), build(override, device="meta").to_empty(device="cpu")
    assert ("lm_head.weight" in real.state_dict()) == (not tied)
    empty.reset_parameters()  # the buffers that are computed, and not in the state dict, come from here
    empty.load_state_dict(real.state_dict())
    torch.testing.assert_close(empty(tokens)[0], real(tokens)[0])
    if tied:  # still tied: the head follows the embeddings
        empty.embeddings.weight.zero_()
        assert empty(tokens)[0].eq(0).all()


@pytest.mark.slow
def test_a_tied_head_is_the_embedding_matrix(tokens: Tensor):
    tied, untied = build("model.tie_embeddings=true"), build()
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.embeddings.weight})
    logits, _ = tied(tokens % 9)
    torch.testing.assert_close(logits, untied(tokens % 9)[0])
    logits.logsumexp(-1).sum().backward()
    assert tied.embeddings.weight.grad[9:].abs().sum() > 0  # tokens that were not in the input are learned as well


@torch.no_grad()
def test_a_norm_of_embeddings(tokens: Tensor):
    model, normed = build("model.norm=LayerNorm"), build("model.norm=LayerNorm", "model.embedding_norm=true")
    weight, bias = torch.randn(2, HIDDEN)
    normed.load_state_dict({**model.state_dict(), "embedding_norm.weight": weight, "embedding_norm.bias": bias})
    table = model.embeddings.weight
    table.copy_(nn.functional.layer_norm(table, (HIDDEN,), weight, bias, 1e-6))
    torch.testing.assert_close(normed(tokens)[0], model(tokens)[0])


@torch.no_grad()
def test_a_cap_of_the_logits(tokens: Tensor):
    model, capped = build(), build("model.logit_cap=0.25")
    capped.load_state_dict(model.state_dict())
    logits = model(tokens)[0]
    assert logits.abs().max() > 0.25
    torch.testing.assert_close(capped(tokens)[0], 0.25 * (4 * logits).tanh())
    with pytest.raises(UserError, match=r"^logit_cap: -1.0 must be a finite number above 0"):
        build("model.logit_cap=-1.0")


@pytest.mark.slow
@pytest.mark.parametrize("cap", ["null", "0.3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_its_loss_is_that_of_its_logits_bitwise(tied: bool, packed: bool, cap: str):
    model = build(f"model.tie_embeddings={str(tied).lower()}", f"model.logit_cap={cap}")
    bounds = torch.tensor([0, 4, LENGTH]) if packed else None
    tokens, labels = torch.randint(VOCAB, (2, 1 if packed else 2, LENGTH))
    labels[0, 3:6] = -100
    actual, expected = (
        (loss, torch.autograd.grad(loss, list(model.parameters())))
        for loss in (
            model.loss(tokens, labels, bounds),
            token_losses(model(tokens, cu_seqlens=bounds)[0], labels).sum(),
        )
    )
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(x, y) for x, y in zip(actual[1], expected[1], strict=True))


def test_forward_gives_logits_and_loss_the_loss(model: zoo.LanguageModel, tokens: Tensor):
    shapes = []
    with model.register_forward_hook(lambda *arguments: shapes.append(arguments[-1][0].shape)):
        assert model.loss(tokens, tokens).shape == ()
        model(tokens, model.init_state(2))
    assert shapes == [(2, LENGTH, VOCAB)]  # nothing else comes out of `forward`
    with pytest.raises(TypeError, match="labels"):
        model(tokens, labels=tokens)


@torch.no_grad()
def test_reset_parameters_reaches_every_parameter():
    model = build()
    for parameter in model.parameters():
        parameter.fill_(math.nan)
    model.reset_parameters()
    assert [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()] == []


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_initialisation(std: float):
    model = build("model.hidden_size=128", "model.vocab_size=512", f"model.initializer_range={std}")
    linear = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    assert len(linear) > 10
    for module in linear:
        expected = std * (1 + 4 / math.sqrt(module.weight.numel()))  # four standard errors and more
        assert module.weight.std().item() == pytest.approx(std, abs=expected - std), module
        assert abs(module.weight.mean().item()) < 4 * std / math.sqrt(module.weight.numel())
    biased = zoo.LanguageModel(Uniform(Sharing), 7, 8, 1, 1)
    assert biased.mixers[0].proj.bias.eq(0).all()


def test_pytorchs_own_initialisation_of_linear_maps():
    model = build("model.hidden_size=128", "model.vocab_size=512", "model.linear_initializer=uniform")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert 0.9 * bound < module.weight.abs().max() <= bound, module
    assert model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.05)
    with pytest.raises(UserError, match=r"^linear_initializer: 'kaiming' is not one of normal, uniform"):
        zoo.LanguageModel(Uniform(Sharing), 7, 8, 1, 1, linear_initializer="kaiming")


def test_output_projections_start_smaller_where_they_are_many():
    small = build("model.hidden_size=128", "model.scale_output_projections=true")
    outputs = [module for module in small.modules() if isinstance(module, mixers.OutputProjection)]
    assert len(outputs) == 2 * small.num_layers
    for module in small.modules():
        if isinstance(module, nn.Linear):
            scale = (2 * small.num_layers) ** -0.5 if module in outputs else 1.0
            assert module.weight.std().item() == pytest.approx(0.02 * scale, rel=0.1), module
    with pytest.raises(UserError, match=r"^scale_output_projections: Sharing has no OutputProjection"):
        zoo.LanguageModel(Uniform(Sharing), 7, 8, 1, 1, scale_output_projections=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_mambas_steps_start_as_published(device: str):
    with torch.device(device):
        model = zoo.LanguageModel(Uniform(mixers.Mamba1), 7, 512, 1, 1)
    if device == "meta":
        model = model.to_empty(device="cpu")
        model.reset_parameters()
    (mixer,) = model.mixers
    weight = mixer.dt_proj.weight  # U(±rank^-½), whose standard deviation is (3·rank)^-½
    assert weight.shape == (1024, 32)
    assert weight.std().item() == pytest.approx(96**-0.5, rel=0.02)
    assert weight.abs().max() <= 32**-0.5
    assert mixer.x_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_every_layer_is_a_layer_of_its_own():
    layers = build(config="gated_deltanet.yaml").mixers
    assert len({id(parameter) for mixer in layers for parameter in mixer.parameters()}) == 3 * len(
        list(layers[0].parameters())
    )


def test_parameters_are_counted_once():
    assert build().num_parameters() - build("model.tie_embeddings=true").num_parameters() == VOCAB * HIDDEN
    shared = zoo.LanguageModel(Uniform(Sharing), 7, 8, 1, num_layers=5, mlp=None)
    norms = 6 * 8  # before each mixer, and the last
    assert shared.num_parameters() == 2 * 7 * 8 + norms + 8 * 8 + 8
    assert len({id(mixer.proj) for mixer in shared.mixers}) == 1


def test_flops_are_what_is_executed():
    model = build("model.stack.third.window_size=64")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.long))
    assert model.flops(64) == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_state_size():
    hybrid, transformer = build(device="meta"), build(config="transformer.yaml", device="meta")
    assert isinstance(hybrid.state_size(), int)
    assert hybrid.state_size() == hybrid.state_size(10**6) == sum(mixer.state_size() for mixer in hybrid.mixers)
    assert transformer.state_size() == math.inf
    assert transformer.state_size(100) == 3 * 2 * 100 * HIDDEN  # keys and values in three layers


@torch.no_grad()
def test_without_mixers_a_token_is_all_that_is_seen(model: zoo.LanguageModel, tokens: Tensor):
    usual, _ = model(tokens)
    with model.without_mixers():
        silenced, _ = model(tokens)
        alone = torch.cat([model(tokens[:, t : t + 1])[0] for t in range(LENGTH)], 1)
    torch.testing.assert_close(silenced, alone)
    assert not torch.allclose(usual, silenced, atol=1e-2)
    with pytest.raises(ZeroDivisionError), model.without_mixers():
        _ = 1 / 0
    torch.testing.assert_close(model(tokens)[0], usual)  # given back, whatever happened


# "Scaling up the State Size of RNN LLMs", tables 3 and 4: (config, size, E) → parameters, elements of the state; as
# counted, not as rounded in print.
PUBLISHED = {
    ("gated_deltanet.yaml", "size/400m.yaml", 1): (399_724_928, 3_145_728),
    ("gated_deltanet.yaml", "size/400m.yaml", 2): (412_898_048, 6_291_456),
    ("gated_deltanet.yaml", "size/400m.yaml", 4): (426_661_376, 12_582_912),
    ("gated_deltanet.yaml", "size/400m.yaml", 8): (454_188_032, 25_165_824),
    ("gated_deltanet.yaml", "size/1.5b.yaml", 1): (1_466_343_808, 12_582_912),
    ("gated_deltanet.yaml", "size/1.5b.yaml", 2): (1_517_855_488, 25_165_824),
    ("gated_deltanet.yaml", "size/1.5b.yaml", 4): (1_570_547_200, 50_331_648),
    ("gated_deltanet.yaml", "size/1.5b.yaml", 8): (1_675_930_624, 100_663_296),
    ("transformer.yaml", "size/transformer-400m.yaml", None): (399_561_728, math.inf),
    ("transformer.yaml", "size/transformer-1.5b.yaml", None): (1_467_066_368, math.inf),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", PUBLISHED, ids=str)
def test_published_sizes(key: tuple[str, str, int | None]):
    config, size, factor = key
    overrides = [] if factor is None else [f"model.stack.mixer.factor={factor}"]
    model = zoo.build(config, size, *overrides, device="meta")
    assert (model.num_parameters(), model.state_size()) == PUBLISHED[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        # 28 layers have as many parameters as E = 8 (GatedDeltaNet-L); twice the heads of the same size (-H2)
        ("size/400m.yaml", ["model.num_layers=28"], (455_422_912, 3_670_016)),
        ("size/1.5b.yaml", ["model.num_layers=28"], (1_688_888_768, 14_680_064)),
        (
            "size/400m.yaml",
            ["model.stack.mixer.mixer.num_heads=16", "model.stack.mixer.mixer.head_dim=128"],
            (526_242_560, 6_291_456),
        ),
    ],
    ids=["400m-L", "1.5b-L", "400m-H2"],
)
def test_published_alternatives_to_expansion(config: str, overrides: list[str], expected: tuple[int, int]):
    model = zoo.build("gated_deltanet.yaml", config, *overrides, device="meta")
    assert (model.num_parameters(), model.state_size()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("config", "per_state", "shared"), [("gla.yaml", 5, 1), ("gated_deltanet.yaml", 10, 0)])
def test_flops_of_an_expanded_recurrence(config: str, per_state: int, shared: int, factor: int):
    """Table 10 of "Scaling up the State Size of RNN LLMs" counts 6HLD² for GLA and 8HLD² for Gated DeltaNet.

    Ours is 6 and 10 (6 for the state, 2 for the scores of keys and queries, 1 each for the solve and the values), and
    everything repeats for each subhead but GLA's product of scores and values. The delta rule also inverts a triangle
    of 64 tokens: 2752 a token.
    """
    model = zoo.build(
        f"state_expansion/{config}", "size/400m.yaml", f"model.stack.mixer.factor={factor}", device="meta"
    )
    mixer, length = model.mixers[0], 4096
    recurrence = mixer.flops(length) - dense_flops(mixer, length)
    inverse = 2752 * factor if "deltanet" in config else 0
    assert recurrence == ((per_state * factor + shared) * 128**2 + inverse) * 8 * length


class AnswersWithATensor(Sharing):
    def forward(self, x, state=None, *, cu_seqlens=None):
        return self.proj(x)


class TakesXAlone(Sharing):
    def forward(self, x):
        return self.proj(x), None


def test_a_mixer_that_is_none_is_refused_in_words(tokens: Tensor):
    def model(mixer) -> zoo.LanguageModel:
        return zoo.LanguageModel(Uniform(mixer), vocab_size=VOCAB, hidden_size=HIDDEN, num_heads=2, num_layers=1)

    with pytest.raises(UserError, match=r"^forward of AnswersWithATensor must return \(y, state\), got a tensor$"):
        model(AnswersWithATensor)(tokens)
    with pytest.raises(UserError, match=r"^mixer: forward of TakesXAlone must take .*, but it takes \(x\)$"):
        model(TakesXAlone)
    with pytest.raises(UserError, match=r"^mixer: Linear is a module, but not a TokenMixer; mixers.wrap makes one"):
        model(lambda site: nn.Linear(HIDDEN, HIDDEN))
    with pytest.raises(UserError, match=r"^init_state: Sharing does not have it, and decoding starts"):
        model(Sharing).state_size()
    per_layer = 2 * LENGTH * HIDDEN * HIDDEN
    small, large = (model(Sharing).flops(LENGTH), 2 * LENGTH * HIDDEN * VOCAB)
    assert small - large - sum(mlp.flops(LENGTH) for mlp in model(Sharing).mlps) == per_layer


def test_a_wrapped_module_is_continued_like_any_mixer(tokens: Tensor):
    wrapped = mixers.wrap(lambda size: nn.Sequential(nn.Linear(size, size), CumulativeMean()))
    model = zoo.LanguageModel(Uniform(wrapped), vocab_size=VOCAB, hidden_size=HIDDEN, num_heads=2, num_layers=2)
    whole, _ = model(tokens)
    state, parts = model.init_state(len(tokens)), []
    for start, stop in ((0, 9), (9, 10), (10, LENGTH)):
        part, state = model(tokens[:, start:stop], state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert model.state_size(LENGTH) == 2 * LENGTH * HIDDEN


class CumulativeMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
