"""Captured training steps: the same numbers as eager ones, whatever happens between the parts of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels.core.documents import documents
from tests.zoo.tiny import TinyModel, assert_same_parameters, batch
from zoo.train import captured_passes, captured_step
from zoo.train.adamw import AdamW
from zoo.train.captured_passes import CapturedForward
from zoo.train.captured_step import CapturedStep
from zoo.train.metrics import label_scores, total_loss
from zoo.train.optim import clip, parameter_groups, total_norm


class Repeated:
    """Captures a step as its repetition, whose results go to the same tensors each time, as those of a graph do."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.recorded, self.replayed, self.fails_at = 0, 0, fails_at

    def rehearse(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded += 1
        if self.recorded == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nand advice")
        first: list[Any] = []

        def replay() -> Any:
            self.replayed += 1
            result = step()
            if not first:
                first.append(result)
            elif result is not None:
                pairs = zip(first[0], result, strict=True) if not isinstance(result, Tensor) else [(first[0], result)]
                for old, new in pairs:
                    if new is not None and old is not new:
                        old.data.copy_(new.data)
            return first[0] if first else None

        return replay


class Loop:
    """A training loop in eager or captured steps."""

    def __init__(self, recorder: Repeated | None, dropout: float = 0.0, clip_at: float | None = 0.5) -> None:
        self.model, self.clip_at = TinyModel(dropout), clip_at
        groups = parameter_groups(self.model, 0.1)
        self.optimizer = AdamW(groups, 2**-6, (0.9, 0.95), 1e-8)
        self.captured = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        if recorder is not None:
            self.captured = CapturedStep(self.loss, self.model.parameters(), recorder)
            self.optimizer.replay = partial(self.captured.update, self.optimizer)

    def loss(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = total_loss(self.model, tokens, labels)
        return total / labels.numel(), total.detach()

    def step(self, number: int, batches: int = 1, lengths: tuple[int, ...] = (16,), bad: bool = False) -> None:
        torch.manual_seed(number)
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] = 2**-6 * (number + 1) / 8
        for each in range(batches):
            tokens, labels, _ = batch(100 * number + each)
            length = lengths[each % len(lengths)]
            inputs, first = (tokens[:, :length], labels[:, :length]), each == 0
            if self.captured is None:
                loss, _ = self.loss(*inputs)
            else:
                self.captured.prepare(*inputs, first=first)
                loss, total = self.captured(*inputs, first=first)
                assert total == pytest.approx(float(loss.detach()) * inputs[1].numel())
            loss = loss / batches
            if bad:
                loss.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
            loss.backward()
            self.losses.append(loss.item())
        parameters = list(self.model.parameters())
        norm = (
            total_norm(p.grad for p in parameters if p.grad is not None)
            if self.captured is None
            else self.captured.gradient_norm()
        )
        self.norms.append(norm.item())
        self.optimizer.found_inf = (~norm.isfinite()).float()
        if self.clip_at is not None and self.captured is None:
            clip(parameters, self.clip_at, norm)
        elif self.clip_at is not None:
            self.captured.clip(self.clip_at, norm)
        self.optimizer.step()


def alike(one: Loop, other: Loop) -> None:
    """Check that two loops computed the same to the bit."""
    assert one.losses == other.losses
    assert repr(one.norms) == repr(other.norms)  # nan is not equal to itself
    assert_same_parameters(one.model, other.model)


def both(*steps: dict[str, Any], **settings: Any) -> tuple[Loop, Loop, Repeated]:
    """An eager and a captured loop after the same steps."""
    recorder = Repeated()
    eager, captured = Loop(None, **settings), Loop(recorder, **settings)
    for loop in (eager, captured):
        for number, arguments in enumerate(steps):
            loop.step(number, **arguments)
    return eager, captured, recorder


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("clip_at", [0.5, None])
def test_captured_steps_compute_the_same_to_the_bit(dropout: float, clip_at: float | None):
    steps = [{}, {}, {"bad": True}, {"batches": 3}, {"batches": 3, "bad": True}, {"batches": 2}, {}]
    eager, captured, recorder = both(*steps, dropout=dropout, clip_at=clip_at)
    alike(eager, captured)
    assert captured.captured.refused is None
    assert recorder.recorded == 4 + 2 + (
        clip_at is not None
    )  # two passes for each way to treat gradients; norm, update
    assert recorder.replayed > 2 * sum(step.get("batches", 1) for step in steps)


MIXED = [
    {"lengths": (8,)},
    {},
    {"lengths": (8, 8), "batches": 2},
    {"lengths": (8, 16, 4), "batches": 3},
    {"lengths": (16, 8), "batches": 2, "bad": True},
    {"lengths": (4,)},
    {"batches": 2},
]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_each_shape_has_its_own_passes(dropout: float, caplog: pytest.LogCaptureFixture):
    eager, captured, recorder = both({}, *MIXED, dropout=dropout)
    alike(eager, captured)
    assert recorder.recorded == captured.captured.parts == 3 * 4 + 3  # all shapes share the norm, clipping and update
    assert caplog.messages == []


def test_further_shapes_run_eagerly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(captured_step, "MOST_SHAPES", 2)
    eager, captured, recorder = both({}, *MIXED)
    alike(eager, captured)
    assert recorder.recorded == 2 * 4 + 3
    assert caplog.messages == ["cuda_graph: batches of other shapes than the first 2 run eagerly"]


def test_the_first_batch_of_a_shape_keeps_the_gradients_of_the_step():
    """Its capture replays a backward pass, which writes to the memory of the gradients."""
    eager, captured, _ = both({}, {"lengths": (16, 8), "batches": 2}, {"lengths": (16, 16, 4), "batches": 3})
    alike(eager, captured)


def test_a_parameter_without_gradients_for_some_shapes_ends_the_replays(caplog: pytest.LogCaptureFixture):
    weights = [nn.Parameter(torch.ones(())) for _ in range(2)]

    def loss(x: Tensor) -> tuple[Tensor]:
        return (sum(weight * x.sum() for weight in weights[: len(x)]),)

    step = CapturedStep(loss, weights, Repeated())
    step.prepare(torch.ones(1))
    assert step.refused is None
    step.prepare(torch.ones(2))
    assert step.refused == "batches of different shapes give gradients to different parameters"
    step(torch.ones(2))[0].backward()
    assert [weight.grad for weight in weights] == [2, 2]


@pytest.mark.parametrize("part", range(1, 8))
def test_a_part_that_cannot_be_captured_ends_the_replays(part: int, caplog: pytest.LogCaptureFixture):
    eager, captured = Loop(None), Loop(Repeated(fails_at=part))
    for loop in (eager, captured):
        for number in range(4):
            loop.step(number, batches=1 + number % 2)
    alike(eager, captured)
    reason = "operation not permitted when stream is capturing"
    assert caplog.messages == [f"cuda_graph: the training step runs eagerly: {reason}"]
    assert captured.captured.refused == reason


def test_gradients_may_be_changed_between_the_passes_and_the_update():
    def change(loop: Loop) -> None:
        for number in range(5):
            handle = loop.optimizer.register_step_pre_hook(lambda *_, at=number: changed(loop.model, at))
            loop.step(number)
            handle.remove()

    def changed(model: nn.Module, number: int) -> None:
        first, second, *_ = model.parameters()
        if number == 2:
            first.grad.mul_(3)
        if number == 3:
            second.grad = second.grad * 2
        if number == 4:
            first.grad = None

    eager, captured = Loop(None), Loop(Repeated())
    for loop in (eager, captured):
        change(loop)
    alike(eager, captured)


def test_parameters_may_be_frozen_and_moved():
    eager, captured = Loop(None), Loop(Repeated())
    for loop in (eager, captured):
        loop.step(0)
        loop.step(1)
        loop.model.head.weight.requires_grad_(False)
        loop.step(2)
        loop.model.head.weight.requires_grad_(True)
        loop.model.mixer_weight.data = loop.model.mixer_weight.data.clone()
        loop.step(3)
        loop.step(4)
    alike(eager, captured)
    assert captured.captured.parts == 5


def test_other_settings_of_the_optimiser_may_change(caplog: pytest.LogCaptureFixture):
    eager, captured = Loop(None), Loop(Repeated())
    for loop in (eager, captured):
        for number in range(4):
            loop.optimizer.param_groups[0]["betas"] = (0.9 - number / 20, 0.95)
            loop.step(number)
    alike(eager, captured)
    assert caplog.messages == [
        "cuda_graph: the update runs eagerly, since settings other than the learning rate change"
    ]


def test_a_step_that_is_not_the_same_each_time_is_not_replayed(caplog: pytest.LogCaptureFixture):
    calls = []

    def loss(x: Tensor) -> tuple[Tensor]:
        calls.append(x)
        return (len(calls) * (weight * x).sum(),)

    weight = nn.Parameter(torch.ones(()))
    step = CapturedStep(loss, [weight], Repeated())
    step.prepare(torch.ones(()))
    assert step.refused == "a replay has the loss 2 and the gradient norm 2, where the eager step has 1 and 1"
    (value,) = step(torch.ones(()))
    value.backward()
    assert weight.grad == 3
    assert len(caplog.messages) == 1


class Sharing:
    """Processes that share sequences, of which another one may refuse."""

    count = 2

    def __init__(self) -> None:
        self.other: str | None = None
        self.heard: list[str] = []

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext()

    def first_reason(self, reason: str | None) -> str | None:
        self.heard += [] if reason is None else [reason]
        return reason or self.other


def test_an_error_while_other_processes_wait_for_messages_is_raised():
    """A process that went on to the next step would send its messages to a step that the others have not finished."""
    weight, sharing = nn.Parameter(torch.ones(())), Sharing()

    def loss(x: Tensor) -> tuple[Tensor]:
        if len(x) > 1:
            raise RuntimeError("out of memory")
        return ((weight * x).sum(),)

    step = CapturedStep(loss, [weight], Repeated(), None, sharing)
    step.prepare(torch.ones(1))
    with pytest.raises(RuntimeError, match="out of memory"):
        step.prepare(torch.ones(2))
    alone = CapturedStep(loss, [weight], Repeated())
    alone.prepare(torch.ones(2))
    assert alone.refused == "out of memory"


def test_an_unexpected_error_of_a_capture_is_raised_after_others_have_heard_of_it(monkeypatch: pytest.MonkeyPatch):
    weight, sharing, recorder = nn.Parameter(torch.ones(())), Sharing(), Repeated()
    step = CapturedStep(lambda x: ((weight * x).sum(),), [weight], recorder, None, sharing)

    def broken(work: Callable[[], Any]) -> Any:
        raise ValueError("a mistake")

    monkeypatch.setattr(recorder, "record", broken)
    with pytest.raises(ValueError, match="a mistake"):
        step.prepare(torch.ones(1))
    assert sharing.heard == ["a mistake"]


def test_no_shape_is_captured_once_another_process_has_refused(caplog: pytest.LogCaptureFixture):
    weight, sharing, recorder = nn.Parameter(torch.ones(())), Sharing(), Repeated()
    step = CapturedStep(lambda x: ((weight * x).sum(),), [weight], recorder, None, sharing)
    step.prepare(torch.ones(1))
    sharing.other = "no memory there"
    step.prepare(torch.ones(1))
    assert (step.refused, step.parts) == (None, 2)
    step.prepare(torch.ones(2))
    assert (step.refused, step.parts, recorder.recorded) == ("no memory there", 0, 2)
    assert caplog.messages == ["cuda_graph: the training step runs eagerly: no memory there"]


def test_steps_that_depend_on_documents_in_more_ways_are_not_captured(caplog: pytest.LogCaptureFixture):
    weight, recorder = nn.Parameter(torch.ones(())), Repeated()

    def loss(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor]:
        documents(cu_seqlens, 4).forbid_graphs("lengths are sent")
        return ((weight * x).sum(),)

    step = CapturedStep(loss, [weight], recorder)
    step.prepare(torch.ones(1, 4), cu_seqlens=torch.tensor([0, 2, 4]))
    assert (step.refused, recorder.recorded) == ("lengths are sent", 0)
    assert caplog.messages == ["cuda_graph: the training step runs eagerly: lengths are sent"]


def test_a_captured_forward_pass_follows_the_weights(caplog: pytest.LogCaptureFixture):
    """Batches of two shapes, before and after the weights are moved."""
    model, recorder = TinyModel(), Repeated()

    def losses(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return label_scores(model, tokens, labels)

    captured = CapturedForward(losses, model.parameters(), recorder)
    for number in range(6):
        tokens, labels, _ = batch(number)
        tokens, labels = tokens[: 4 - number % 2], labels[: 4 - number % 2]
        with torch.inference_mode():
            pairs = list(zip(captured(tokens, labels), losses(tokens, labels), strict=True))
        assert all(torch.equal(x, y) for x, y in pairs)
        with torch.no_grad():
            model.mixer_weight.mul_(2)
        if number == 3:
            model.mixer_weight.data = model.mixer_weight.data.clone()
    assert recorder.recorded == 4
    assert caplog.messages == []


def test_a_captured_forward_pass_takes_packed_documents():
    """Boundaries are rounded up to one, two and four documents; more shapes than may be captured run eagerly."""
    recorder, seen = Repeated(), []

    def compute(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        seen.append(len(cu_seqlens))
        return (x * documents(cu_seqlens, x.shape[1]).owner,)

    captured = CapturedForward(compute, [], recorder)
    for bounds in ([0, 16], [0, 3, 16], [0, 11, 16], [0, 2, 4, 16], [0, 2, 4, 5, 16], [0, 16]):
        x, cu_seqlens = torch.randn(1, 16), torch.tensor(bounds, dtype=torch.int32)
        with torch.inference_mode():
            (scaled,) = captured(x, cu_seqlens=cu_seqlens)
        assert torch.equal(scaled, x * documents(cu_seqlens, 16).owner)
    assert captured.refused is None
    assert recorder.recorded == 3
    assert seen[-1] == 2  # the last replay reads padded boundaries
    assert set(seen) == {2, 3, 4, 5}


def test_forward_passes_of_many_shapes_run_eagerly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(captured_passes, "MOST_SHAPES", 2)
    recorder = Repeated()
    captured = CapturedForward(lambda x: (x + 1,), [], recorder)
    assert [captured(torch.zeros(n))[0].sum().item() for n in (1, 2, 3, 2)] == [1, 2, 3, 2]
    assert recorder.recorded == 2


def test_a_forward_pass_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture):
    failures = []
    captured = CapturedForward(lambda x: (x + 1,), [], Repeated(fails_at=1), lambda: failures.append(1))
    assert [captured(torch.ones(()))[0].item() for _ in range(2)] == [2, 2]
    assert len(failures) == len(caplog.messages) == 1
