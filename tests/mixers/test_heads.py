import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mixers
from kernels import UserError
from mixers import (
    Expanded,
    ForgettingAttention,
    GatedDeltaNet,
    LinearMixer,
    RMSNorm,
    Site,
    SlidingWindowAttention,
    SoftmaxAttention,
    ZeroCentredRMSNorm,
    split_heads,
)

SITE = Site(hidden_size=64, num_heads=4)
LINEAR = [name for name in mixers.names() if issubclass(mixers.get(name), LinearMixer)]
ATTENTION = [SoftmaxAttention, SlidingWindowAttention, ForgettingAttention]


def linear(name: str, heads: int = 4, size: int = 16) -> LinearMixer:
    """A mixer with heads as attention has them."""
    cls = mixers.get(name)
    assert issubclass(cls, LinearMixer)
    sizes = cls.sized_like(heads, size, 64)
    return cls(SITE, **{each: sizes[each] for each in sizes if each in inspect.signature(cls).parameters})


def after(new: LinearMixer, old: mixers.TokenMixer) -> LinearMixer:
    """The new mixer with what it inherits."""
    new.load_state_dict({**new.state_dict(), **new.inherited(old)})
    return new


def inputs() -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("name", LINEAR)
def test_queries_keys_and_values_are_those_of_attention(name: str, kind: type[SoftmaxAttention]):
    old = kind(SITE, num_kv_heads=2)
    new, x = after(linear(name), old), inputs()
    own, parts = new.state_dict(), [split_heads(y, heads) for y, heads in zip(old.in_proj(x), (4, 2, 2), strict=False)]
    parts[1:] = [y.repeat_interleave(2, 2) for y in parts[1:]]
    weights = dict(zip("qkvo", new.head_weights, strict=True))
    for stream, expected in zip("qkv", parts, strict=True):
        if weights[stream] is None:
            continue
        actual = split_heads(F.linear(x, own[weights[stream]]), 4 * (1 if stream == "q" else new.steps))
        for step in actual.split(4, 2):
            torch.testing.assert_close(step, expected, msg=stream)
    assert torch.equal(own[weights["o"]], old.o_proj.weight)


@pytest.mark.parametrize("name", LINEAR)
def test_gates_and_decays_start_as_in_a_new_mixer(name: str):
    torch.manual_seed(0)
    fresh = linear(name).state_dict()
    torch.manual_seed(0)
    new = linear(name)
    inherited = after(new, SoftmaxAttention(SITE, num_kv_heads=2)).state_dict()
    changed = {each for each in fresh if not torch.equal(fresh[each], inherited[each])}
    convolutions = {f"{stream}_features.weight" for stream in "qkv"} & fresh.keys()
    assert changed - convolutions == {weight for weight in new.head_weights if weight is not None}


def test_convolutions_pass_on_the_token():
    new = after(linear("GatedDeltaNet"), SoftmaxAttention(SITE))
    s = new.project(inputs())
    v, _ = new.v_features(s.v, None, torch.arange(5)[None], None)
    torch.testing.assert_close(v, F.silu(s.v))


@pytest.mark.parametrize("over", ["head", "width"])
@pytest.mark.parametrize("norm", [RMSNorm, ZeroCentredRMSNorm])
def test_normed_queries_keep_their_direction(norm: type[RMSNorm], over: str):
    old = SoftmaxAttention(SITE, num_kv_heads=2, qk_norm=norm, qk_norm_over=over)
    with torch.no_grad():
        for each in (old.q_norm, old.k_norm):
            each.weight.uniform_(0.5, 2)
    new, x = after(linear("GatedDeltaNet"), old), inputs()
    s, (q, k, _) = new.project(x), old.in_proj(x)
    q, k = old._normed(split_heads(q, 4), old.q_norm), old._normed(split_heads(k, 2), old.k_norm)
    for actual, expected in ((s.q, q), (s.k, k.repeat_interleave(2, 2))):
        torch.testing.assert_close(F.normalize(actual, dim=-1), F.normalize(expected, dim=-1))


def test_an_expanded_mixer_inherits_too():
    old = SoftmaxAttention(SITE)
    new = after(Expanded(GatedDeltaNet, factor=2)(SITE), old)
    torch.testing.assert_close(new.in_proj(inputs())[0], old.in_proj(inputs())[0])


def test_biases_are_carried_where_both_have_them():
    old = SoftmaxAttention(SITE, bias=True, output_bias=True)
    assert not any(name.endswith("bias") for name in linear("GatedDeltaNet").inherited(old))

    class WithBias(GatedDeltaNet):
        def __init__(self, site: Site):
            super().__init__(site)
            self.o_proj = mixers.OutputProjection(64, 64, bias=True)

    assert torch.equal(WithBias(SITE).inherited(old)["o_proj.bias"], old.o_proj.bias)


@pytest.mark.parametrize(
    ("heads", "size", "message"),
    [
        (2, 32, "its queries have 2 heads of 32, but those of SoftmaxAttention in layer 0 have 4 heads of 16"),
        (2, 16, "its queries have 2 heads of 16"),
        (8, 16, "its outputs have 8 heads of 16"),
    ],
)
def test_heads_that_do_not_fit(heads: int, size: int, message: str):
    with pytest.raises(UserError, match=f"^mixer: {message}.*cannot be carried over"):
        linear("GatedDeltaNet", heads, size).inherited(SoftmaxAttention(SITE))


def test_a_layer_without_such_maps_passes_nothing_on():
    assert mixers.get("Mamba1")(SITE).head_maps() == {}
