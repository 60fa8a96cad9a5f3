"""Streams from lower layers to higher ones: what a mixer declares, passes and needs, and mistakes about them."""

from functools import partial

import pytest
import torch
from torch import Tensor

import mixers
from mixers import ContractError, GatedDeltaNet, Site
from mixers.contract import CLAUSES
from mixers.interface import checked_streams, placed

SITE = Site(hidden_size=64, num_heads=2)
check = partial(mixers.check_mixer, expanded=False)


class Below(GatedDeltaNet):
    """Passes what it reads."""

    passes = ("input",)

    def forward(self, x, state=None, *, cu_seqlens=None, context_parallel=None, passed=None):
        options = {"cu_seqlens": cu_seqlens, "context_parallel": context_parallel}
        result = super().forward(x, state, **options)
        return result if passed is None else (*result, {"input": x})


class Above(GatedDeltaNet):
    """Adds what another one read."""

    needs = ("input",)

    def forward(self, x, state=None, *, cu_seqlens=None, context_parallel=None, passed=None):
        options = {"cu_seqlens": cu_seqlens, "context_parallel": context_parallel}
        return (*super().forward(x + passed["input"].tanh(), state, **options), {})


def test_one_that_passes_is_checked_alone_and_above_itself():
    passed = check(Below)
    assert passed[: len(CLAUSES)] == [clause.removeprefix("above itself: ") for clause in passed[len(CLAUSES) :]]


def test_one_that_needs_is_checked_above_the_other():
    assert len(check(Above, below=Below)) == len(CLAUSES)
    message = r"^mixer: Above in layer 1 needs the stream 'input', which no lower layer passes$"
    with pytest.raises(ContractError, match=message):
        check(Above)


class FromTheFuture(Below):
    """Passes a stream in which a token sees the next one."""

    def forward(self, x, state=None, *, passed=None, **options):
        result = super().forward(x, state, passed=passed, **options)
        return result if passed is None else (*result[:2], {"input": x.roll(-1, 1)})


class FromOtherDocuments(Below):
    """Passes a stream in which a token sees the previous one, even of another document."""

    def forward(self, x, state=None, *, passed=None, **options):
        result = super().forward(x, state, passed=passed, **options)
        return result if passed is None else (*result[:2], {"input": x.roll(1, 1)})


class Detached(Below):
    """Passes a stream of parameters without their gradient."""

    def __init__(self, site: Site):
        super().__init__(site)
        self.norm = mixers.RMSNorm(site.hidden_size)

    def forward(self, x, state=None, *, passed=None, **options):
        result = super().forward(x, state, passed=passed, **options)
        return result if passed is None else (*result[:2], {"input": self.norm(x).detach()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lower", "broken"),
    [
        (FromTheFuture, {"causality", "whole is pieces is tokens", "packed documents are separate"}),
        (FromOtherDocuments, {"causality", "whole is pieces is tokens", "packed documents are separate"}),
        (Detached, {"every parameter has a gradient"}),
    ],
)
def test_a_broken_stream_is_caught(lower: type, broken: set[str]):
    with pytest.raises(ContractError) as caught:
        check(Above, below=lower)
    actual = {line.partition(": ")[0] for line in str(caught.value).splitlines()}
    assert actual
    assert actual <= broken


def answering(result: object) -> type[Below]:
    class Answers(Below):
        def forward(self, x, state=None, *, cu_seqlens=None, passed=None):
            return (x, None) if passed is None else (x, None, *result)

    return Answers


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((), r"must return \(y, state, streams\) where it is called with passed, got a tuple of 2"),
        ((None,), r"must return \(y, state, streams\) where it is called with passed, got a tuple of 3"),
        (({},), r"must return the streams that it declares \(input\), got none"),
        (({"output": 1},), r"must return the streams that it declares \(input\), got output"),
        (({"input": 1},), r"must return the stream input as \[2, 3, …\] like x, got a int"),
        (({"input": torch.zeros(2, 4, 1)},), r"must return the stream input as \[2, 3, …\] like x, got \(2, 4, 1\)"),
    ],
)
def test_what_comes_back_is_checked(result: tuple, message: str):
    mixer, x = answering(result)(SITE), torch.zeros(2, 3, 64)
    with pytest.raises(mixers.UserError, match=f"^forward of Answers {message}$"):
        checked_streams(mixer(x, passed={}), mixer, x)


def test_one_that_declares_streams_takes_them():
    class Deaf(GatedDeltaNet):
        passes = ("input",)

    with pytest.raises(mixers.UserError, match=r"^mixer: forward of Deaf must take \(.*, passed=None\), but it takes"):
        placed(Deaf(SITE), SITE)


def test_streams_end_at_a_mixer_of_both_directions():
    seen: list[Tensor] = []

    def inner(site: Site) -> GatedDeltaNet:
        seen.append(site.passed)
        return GatedDeltaNet(site)

    mixers.Bidirectional(SITE._replace(passed=("input",)), mixer=inner)
    assert seen == [(), ()]
