"""The first mistakes of authors of mixers: each ends in one sentence of `check_mixer`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import kernels
import mixers
from mixers import Cache, LinearMixer, Position, Projection, Site, Streams, TokenMixer, per_document
from mixers.interface import placed

SITE = Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
TUTORIAL = "(tutorials/02_your_own_mixer.md)"
DERIVED = f"it cannot be derived {TUTORIAL}"


class Sum(NamedTuple):
    """The state of a leaky sum."""

    total: Tensor


class Leaky(TokenMixer):
    """y_t = W Σ_s 0.9^(t−s) V x_s, without `state_size` and `flops`."""

    def __init__(self, site: Site):
        super().__init__()
        self.v = nn.Linear(site.hidden_size, site.hidden_size)
        self.out = mixers.OutputProjection(site.hidden_size, site.hidden_size)

    def forward(self, x, state=None, *, cu_seqlens=None):
        return per_document(self.mix, x, state, cu_seqlens)

    def mix(self, x: Tensor, state: Sum | None) -> tuple[Tensor, Sum | None]:
        v, sums = self.v(x), []
        total = torch.zeros_like(v[:, 0]) if state is None else state.total
        for t in range(v.shape[1]):
            total = 0.9 * total + v[:, t]
            sums.append(total)
        return self.out(torch.stack(sums, 1)), None if state is None else Sum(total)

    def init_state(self, batch_size, device=None, dtype=None):
        like = self.v.weight
        size = (batch_size, self.v.out_features)
        return Sum(torch.zeros(size, device=device or like.device, dtype=dtype or like.dtype))


class Past(NamedTuple):
    """The state of a mean over all tokens."""

    inputs: Cache
    seen: Position


class Mean(TokenMixer):
    """The mean of all tokens so far, which are its state; also without `state_size` and `flops`."""

    constant_state = False

    def __init__(self, site: Site):
        super().__init__()
        self.out = nn.Linear(site.hidden_size, site.hidden_size)

    def forward(self, x, state=None, *, cu_seqlens=None):
        return per_document(self.mix, x, state, cu_seqlens)

    def mix(self, x: Tensor, state: Past | None) -> tuple[Tensor, Past | None]:
        inputs = x if state is None else torch.cat([state.inputs, x], 1)
        counts = torch.arange(1, inputs.shape[1] + 1, device=x.device)[:, None]
        y = self.out(inputs.cumsum(1) / counts)[:, -x.shape[1] :]
        return y, None if state is None else Past(inputs, state.seen + x.shape[1])

    def init_state(self, batch_size, device=None, dtype=None):
        like = self.out.weight
        inputs = torch.zeros(batch_size, 0, 64, device=device or like.device, dtype=dtype or like.dtype)
        return Past(inputs, torch.zeros(batch_size, dtype=torch.int64, device=inputs.device))


class Convolution(nn.Module):
    """A causal convolution, which is no token mixer."""

    def __init__(self, size: int, width: int = 3):
        super().__init__()
        self.conv = nn.Conv1d(size, size, width, padding=width - 1)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


def returning(change: Callable[[tuple[Tensor, Any]], Any]) -> type[Leaky]:
    """A mixer that returns something other than (y, state)."""

    class Returns(Leaky):
        def forward(self, x, state=None, *, cu_seqlens=None):
            return change(super().forward(x, state, cu_seqlens=cu_seqlens))

    return Returns


class TakesXAlone(Leaky):
    def forward(self, x):
        return super().forward(x)


class TakesNoDocuments(Leaky):
    def forward(self, x, state=None):
        return super().forward(x, state)


class DropsItsState(Leaky):
    def forward(self, x, state=None, *, cu_seqlens=None):
        return super().forward(x, state, cu_seqlens=cu_seqlens)[0], None


class NeedsItsState(Leaky):
    def mix(self, x, state):
        return self.out(x + state.total), state


class HasNoState(TokenMixer):
    def __init__(self, site: Site):
        super().__init__()
        self.module = Convolution(site.hidden_size)

    def forward(self, x, state=None, *, cu_seqlens=None):
        return self.module(x), None


class HasNoForward(TokenMixer):
    def __init__(self, site: Site):
        super().__init__()


class StartsWithoutABatch(Leaky):
    def init_state(self):
        return super().init_state(1)


class IgnoresTheBatch(Leaky):
    def init_state(self, batch_size, device=None, dtype=None):
        return super().init_state(3, device, dtype)


class TakesMore(Leaky):
    def __init__(self, site: Site, width: int):
        super().__init__(site)


class DividesByZero(Leaky):
    def mix(self, x, state):
        y, state = super().mix(x, state)
        return y / 0, state


class Projects(LinearMixer):
    def __init__(self, site: Site):
        super().__init__(site, num_heads=2, key_size=8, value_size=8)
        self.in_proj = Projection(site.hidden_size, {"q": 16, "k": 16, "v": 16})


class HasNoReadout(Projects):
    def project(self, x):
        return Streams(*(mixers.split_heads(part, 2) for part in self.in_proj(x)))


class ForgetsToReturn(mixers.LinearAttention):
    def gates(self, s):
        s.replace(log_decay=None)


class WithoutHeads(HasNoReadout):
    def project(self, x):
        return Streams(*self.in_proj(x))


CALL = "(x, state=None, *, cu_seqlens=None)"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        kind: (partial(returning, change), f"forward of Returns must return {sentence}")
        for kind, change, sentence in [
            ("a tensor", lambda result: result[0], "(y, state), got a tensor"),
            ("a list", list, "(y, state), got a list"),
            ("three", lambda result: (*result, 0), "(y, state), got a tuple of 3"),
            ("nothing", lambda result: None, "(y, state), got None"),
            ("the state first", lambda result: result[::-1], "(y, state) with a tensor y, got None as y"),
            (
                "one token",
                lambda result: (result[0][:, -1:], result[1]),
                "y in the shape of x, (2, 21, 64), got (2, 1, 64)",
            ),
        ]
    },
    "x alone": (lambda: TakesXAlone, f"mixer: forward of TakesXAlone must take {CALL}, but it takes (x)"),
    "no documents": (
        lambda: TakesNoDocuments,
        f"mixer: forward of TakesNoDocuments must take {CALL}, but it takes (x, state=None)",
    ),
    "a state that is dropped": (
        lambda: DropsItsState,
        "forward of DropsItsState must return the next state if it gets one, got None",
    ),
    "a state that is needed": (
        lambda: NeedsItsState,
        "forward of NeedsItsState fails for x of shape (2, 21, 64) "
        "(AttributeError: 'NoneType' object has no attribute 'total')",
    ),
    "no init_state": (
        lambda: HasNoState,
        f"init_state: HasNoState does not have it, and decoding starts from the state that it returns {TUTORIAL}",
    ),
    "no forward": (
        lambda: HasNoForward,
        f"forward: HasNoForward does not have it, and a token mixer maps x and a state to (y, state) {TUTORIAL}",
    ),
    "init_state without a batch": (
        lambda: StartsWithoutABatch,
        "init_state of StartsWithoutABatch fails for a batch size of 2 (TypeError: StartsWithoutABatch.init_state() "
        "takes 1 positional argument but 2 were given)",
    ),
    "init_state for another batch": (
        lambda: IgnoresTheBatch,
        "forward of IgnoresTheBatch fails with the state of init_state (RuntimeError: …)",
    ),
    "an argument without a default": (
        lambda: TakesMore,
        "TakesMore(site) fails, and a mixer takes a mixers.Site first and then named arguments with defaults "
        "(TypeError: TakesMore.__init__() missing 1 required positional argument: 'width')",
    ),
    "a division by zero": (lambda: DividesByZero, "forward of DividesByZero returns numbers that are not finite"),
    "no project": (
        lambda: Projects,
        f"project: Projects does not have it, and a LinearMixer makes its queries, keys and values there {TUTORIAL}",
    ),
    "no readout": (
        lambda: HasNoReadout,
        f"readout: HasNoReadout does not have it, and a LinearMixer makes its output there {TUTORIAL}",
    ),
    "streams without heads": (
        lambda: WithoutHeads,
        "WithoutHeads.project: q must be [B,T,heads,size], got (2, 21, 16); use split_heads",
    ),
    "gates that return nothing": (
        lambda: ForgetsToReturn,
        "ForgetsToReturn.gates: returned NoneType, must return s or s.replace(…)",
    ),
    "a module": (
        lambda: Convolution,
        f"Convolution is not a TokenMixer; pass mixers.wrap(Convolution), or write one {TUTORIAL}",
    ),
    "a function that makes a module": (
        lambda: lambda site: Convolution(site.hidden_size),
        "mixer: Convolution is a module, but not a TokenMixer; mixers.wrap makes one of a causal module, and "
        "tutorials/02_your_own_mixer.md writes one",
    ),
    "an instance": (lambda: Leaky(SITE), "factory: pass the class Leaky, not a module that was built already"),
    "a name": (lambda: "GLA", "factory: 'GLA' is not a class or function that makes a mixer; pass mixers.get('GLA')"),
    "a wrapped recurrent network": (
        lambda: mixers.wrap(lambda size: nn.GRU(size, size, batch_first=True)),
        "module: GRU must return y in the shape of x, (2, 21, 64), got a tuple",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_mixer_says_in_one_sentence_what_is_wrong(mistake: str):
    factory, sentence = MISTAKES[mistake]
    with pytest.raises(mixers.ContractError) as error:
        mixers.check_mixer(factory())
    said = str(error.value)
    start, gap, end = sentence.partition("…")
    if gap:
        assert said.startswith(start), said
        assert said.endswith(end)
        assert "\n" not in said
    else:
        assert said == sentence


class Loops(Leaky):
    def mix(self, x, state):
        return super().mix(x, state) if x.sum().item() < 1e9 else None


@pytest.mark.slow
def test_state_size_and_flops_are_derived():
    assert len(mixers.check_mixer(Leaky)) == 10  # among them that both are right
    mixer = placed(Leaky(SITE), SITE)
    assert mixer.state_size() == 64
    assert mixer.flops(100) == 2 * 100 * 2 * 64 * 64


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Leaky(SITE).flops(8), f"flops: Leaky does not have it, and without self.site = site {DERIVED}"),
        (
            lambda: placed(Mean(SITE), SITE).state_size(8),
            f"state_size: Mean does not have it, and of a state that grows {DERIVED}",
        ),
    ],
    ids=["flops", "state_size"],
)
def test_what_cannot_be_derived_is_one_sentence(call: Callable[[], object], sentence: str):
    with pytest.raises(kernels.UserError) as error:
        call()
    assert str(error.value) == sentence


def test_flops_that_depend_on_numbers_cannot_be_counted():
    with pytest.raises(
        kernels.UserError, match=r"^flops: Loops does not have it, and it cannot be counted on the meta"
    ):
        placed(Loops(SITE), SITE).flops(8)


class Reverses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


@pytest.mark.slow
def test_a_causal_module_is_wrapped():
    assert len(mixers.check_mixer(mixers.wrap(Convolution))) == 10
    mixer = mixers.wrap(Convolution)(SITE)
    assert (mixer.state_size(7), mixer.state_size()) == (7 * 64, math.inf)
    with pytest.raises(mixers.ContractError, match=r"^causality: ") as error:
        mixers.check_mixer(mixers.wrap(lambda size: nn.Sequential(Convolution(size), Reverses())))
    assert "packed documents" not in str(error.value)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            Convolution(8),
            "module: pass the class Convolution, or a function of hidden_size, not one module, which all layers would "
            "share",
        ),
        (3, "module: 3 is neither a class nor a function that makes a module"),
        (Leaky, "module: Leaky is a TokenMixer already; use it directly"),
        (lambda size: Leaky(SITE), "module: Leaky is a TokenMixer already; use it directly"),
        (lambda size: size, "module: <function …> made 64, which is not a module of PyTorch"),
    ],
    ids=["a module", "a number", "a mixer", "a function that makes a mixer", "a function that makes a number"],
)
def test_what_cannot_be_wrapped(module: Any, sentence: str):
    with pytest.raises(kernels.UserError) as error:
        mixers.wrap(module)(SITE)
    assert str(error.value).startswith(sentence.partition("…")[0])
    assert str(error.value).endswith(sentence.partition("…")[2])
