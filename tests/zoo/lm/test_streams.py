"""Streams between layers and states of channel mixers in a language model: RWKV-7 has both."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import kernels
import zoo
from mixers import RWKV7, GatedDeltaNet, Site, SoftmaxAttention, remembered
from mixers.rwkv7 import FIRST_VALUE
from tests.mixers.test_parity import shaken
from tests.mixers.test_passed import Above, Below
from tests.zoo.train.test_captured_step import Repeated
from zoo.generation.chunk_decoder import ChunkDecoder
from zoo.generation.decoder import Decoder
from zoo.generation.generate import generate_tokens
from zoo.generation.graphs import fits
from zoo.lm import Pattern, PostNormBlock, RWKV7ChannelMix, Stack, SwiGLU, Uniform
from zoo.lm.block import LayerState, mix_channels
from zoo.lm.mlp import ChannelMixer
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.compiled_blocks import compiled_blocks
from zoo.train.captured_step import CapturedStep

VOCAB = 19
SMALL = partial(RWKV7, head_dim=8)
HYBRID = Pattern("ARRG", {"A": SoftmaxAttention, "R": SMALL, "G": GatedDeltaNet}, post_norm="A")


def model(
    stack: Stack = HYBRID, mlp: type[ChannelMixer] | None = RWKV7ChannelMix, layers: int = 6
) -> zoo.LanguageModel:
    torch.manual_seed(0)
    return shaken(zoo.LanguageModel(stack, vocab_size=VOCAB, hidden_size=32, num_heads=2, num_layers=layers, mlp=mlp))


def tokens(rows: int = 2, length: int = 70) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def gradients(lm: zoo.LanguageModel, **options: Tensor) -> dict[str, Tensor]:
    x = tokens(1 if options else 2)
    loss = lm.loss(x, x.roll(-1, 1), **options)
    named = dict(lm.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def test_the_first_mixer_of_its_kind_makes_the_stream():
    lm = model()
    assert [mixer.site.passed for mixer in lm.mixers] == [(), (), *[(FIRST_VALUE,)] * 4]
    assert [mixer.value is None for mixer in lm.mixers if isinstance(mixer, RWKV7)] == [True, False, False]
    assert isinstance(lm.layers[0], PostNormBlock)
    seen: list[Tensor] = []
    for layer in (1, 2, 5):
        lm.mixers[layer].register_forward_hook(lambda *args: seen.append(args[-1][2][FIRST_VALUE]))
    lm(tokens())
    assert seen[0].shape == (2, 70, 32)
    assert seen[0] is seen[1] is seen[2]


def test_a_stream_that_nobody_passes():
    message = r"^mixer: Above in layer 0 needs the stream 'input', which no lower layer passes$"
    with pytest.raises(kernels.UserError, match=message):
        model(Pattern("AB", {"A": Above, "B": Below}))
    with pytest.raises(kernels.UserError, match=message):
        model(Uniform(Above))
    model(Pattern("BA", {"A": Above, "B": Below}))(tokens())
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, num_heads=2, num_layers=2)
    zoo.LanguageModel(Uniform(Above), position=Below, **sizes)(tokens())


def test_the_newest_stream_is_read():
    lm = model(Uniform(Below), layers=3)
    seen: list[Tensor] = []
    for mixer in lm.mixers:
        mixer.register_forward_pre_hook(lambda _, args, options: seen.append(options["passed"]), with_kwargs=True)
        mixer.register_forward_hook(lambda _, args, output: seen.append(output[2]))
    lm(tokens())
    assert seen[0] == {}
    for made, read in zip(seen[1::2], seen[2::2], strict=False):
        assert read["input"] is made["input"]


@torch.no_grad()
def test_without_token_mixers_streams_still_pass():
    lm = model()
    with lm.without_mixers():
        logits = lm(tokens())[0]
    assert logits.isfinite().all()
    assert not torch.allclose(logits, lm(tokens())[0])


def test_gradients_reach_the_first_values_by_way_of_the_others():
    lm = model(Uniform(SMALL), layers=3)
    first = lm.mixers[0]
    with torch.no_grad():
        first.o_proj.weight.zero_()  # so that its own output depends on nothing
    actual = gradients(lm)
    assert actual["layers.0.mixer.v_proj.weight"].abs().sum() > 0
    assert not actual["layers.0.mixer.r_proj.weight"].any()


@torch.no_grad()
def test_tokens_one_by_one_and_packed_documents():
    lm = model().double()
    x = tokens()
    expected, state, outputs = lm(x)[0], lm.init_state(2), []
    for t in range(x.shape[1]):
        logits, state = lm(x[:, t : t + 1], state)
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)
    bounds = [0, 3, 3, 40, 70]
    packed, states = lm(x[:1], lm.init_state(4), cu_seqlens=torch.tensor(bounds))
    spans = [(i, j) for i, j in zip(bounds, bounds[1:], strict=False) if j > i]
    torch.testing.assert_close(packed, torch.cat([lm(x[:1, i:j])[0] for i, j in spans], 1))
    repeated, _ = lm(x[:1, :4], states, cu_seqlens=torch.tensor([0, 1, 2, 3, 4]))
    for row, (i, j) in enumerate(zip(bounds, bounds[1:], strict=False)):
        both = torch.cat([x[:1, i:j], x[:1, row : row + 1]], 1)
        torch.testing.assert_close(repeated[:, row], lm(both)[0][:, -1])


@torch.no_grad()
def test_a_state_of_both_mixers(tmp_path: Path):
    lm = model()
    _, state = lm(tokens(), lm.init_state(2))
    assert all(isinstance(part, LayerState) for part in state)
    assert fits(lm.init_state(2), state) is False  # attention grows
    of_mixers = [sum(part.numel() for part in remembered(layer)) for layer in state]
    assert of_mixers == [2 * mixer.state_size(70) for mixer in lm.mixers]  # without streams' histories and MLPs
    assert lm.state_size(10) == sum(mixer.state_size(10) for mixer in lm.mixers)
    zoo.save_state(state, tmp_path / "state.safetensors")
    loaded = zoo.load_state(lm, tmp_path / "state.safetensors")
    for one, other in zip(tree_leaves(loaded), tree_leaves(state), strict=True):
        assert torch.equal(one, other)
    bare = tuple(part.mixer for part in state)
    with pytest.raises(kernels.UserError, match=r"^state: RWKV7ChannelMix has one, so that the layer needs a state of"):
        lm(tokens(), bare)
    assert model(mlp=SwiGLU).init_state(1)[1]._fields == ("matrix", "histories", "position", "carried")


@torch.no_grad()
def test_generation():
    lm, prompts = model(), [tokens()[0, :length] for length in (3, 9, 1)]
    options = {"max_new_tokens": 8, "temperature": 0.0}
    together = torch.stack(list(generate_tokens(lm, prompts, **options)), 1)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row, torch.stack(list(generate_tokens(lm, prompt[None], **options)), 1)[0])
        written = prompt
        for _ in range(8):  # without a state
            written = torch.cat([written, lm(written[None])[0][0, -1:].argmax(-1)])
        assert torch.equal(written[len(prompt) :], row)


@torch.no_grad()
def test_a_decoded_step_fits_into_its_state():
    lm = model(Uniform(SMALL), layers=3)
    _, state = lm(tokens(), lm.init_state(2))
    assert fits(lm.init_state(2), state)
    decoder = Decoder(lm, state)
    decoder(tokens()[:, 0])
    assert fits(state, decoder.state)


@torch.no_grad()
@pytest.mark.slow
def test_chunks_decode_to_the_bit(highest: None):
    lm, x = model(layers=3), tokens(length=140)
    with kernels.deterministic():
        expected = lm(x)[0]
        decoder = ChunkDecoder(lm, [x[0, :63], x[1, :3]])
        logits = decoder()
        for step in range(70):
            assert torch.equal(logits, torch.stack([expected[0, 62 + step], expected[1, 2 + step]]))
            logits = decoder(torch.stack([x[0, 63 + step], x[1, 3 + step]]))


@pytest.mark.parametrize("documents", [False, True])
def test_checkpointed_blocks_have_the_same_gradients(documents: bool):
    lm = model()
    options = {"cu_seqlens": torch.tensor([0, 3, 40, 70], dtype=torch.int32)} if documents else {}
    expected = gradients(lm, **options)
    for every in (1, 2):
        for block, forward in CheckpointedBlocks(every).replaced(lm):
            block.forward = forward
        repeated = gradients(lm, **options)
        for block in lm.layers:
            block.__dict__.pop("forward", None)
        assert [name for name in expected if not torch.equal(expected[name], repeated[name])] == []


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients():
    lm = model(Uniform(SMALL), layers=3)
    expected = gradients(lm)
    torch._dynamo.reset()
    for block, forward in compiled_blocks(lm, "eager"):
        block.forward = forward
    for name, gradient in gradients(lm).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


def test_captured_steps_have_the_same_gradients():
    lm, x = model(Uniform(SMALL), layers=3), tokens()
    expected = gradients(lm)

    def compute(inputs: Tensor) -> tuple[Tensor, ...]:
        return (lm.loss(inputs, inputs.roll(-1, 1)),)

    step = CapturedStep(compute, lm.parameters(), Repeated())
    for _ in range(2):
        step.prepare(x)
        (loss,) = step(x)
        loss.backward()
    assert step.refused is None
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


class Whole(RWKV7ChannelMix):
    """Works on whole sequences only."""

    def forward(self, x, state=None, *, cu_seqlens=None):
        return super().forward(x, state, cu_seqlens=cu_seqlens)


class Forgetful(RWKV7ChannelMix):
    """Returns no state."""

    def forward(self, x, state=None, *, cu_seqlens=None, context_parallel=None):
        return super().forward(x, state, cu_seqlens=cu_seqlens)[0]


def test_mistakes_of_channel_mixers():
    with pytest.raises(kernels.UserError, match=r"^forward of Forgetful must return \(y, state\), got a tensor$"):
        model(mlp=Forgetful)(tokens())
    with pytest.raises(kernels.UserError, match=r"^init_state: SwiGLU is not stateful, or lacks it$"):
        SwiGLU(8).init_state(1)
    model(mlp=Whole, layers=1)(tokens())
    with pytest.raises(kernels.UserError, match=r"^context_parallel: Whole works on whole sequences only$"):
        mix_channels(Whole(8), torch.zeros(1, 2, 8), None, None, object())


def test_a_channel_mixer_knows_its_site():
    assert [mlp.site for mlp in model(layers=3).mlps] == [
        Site(32, 2, layer, 3, passed=passed) for layer, passed in enumerate([(), (), (FIRST_VALUE,)])
    ]
