"""Forward and backward passes as CUDA graphs, for inputs of several shapes, and forward passes alone."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.core.documents import Documents
from kernels.core.torch_internals import copy_each
from zoo.arguments import first_line
from zoo.generation.cuda_graph import Recorder, casts_not_cached
from zoo.train.captured_memory import (
    MOST_SHAPES,
    CaptureAgreement,
    Compute,
    GradientAverage,
    StaticInputs,
    addresses,
    eager,
    packed_documents,
)
from zoo.train.optim import total_norm

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # relative, of a replay to the eager step; some kernels sum in varying order


class _Pass(NamedTuple):
    """Replays of a forward and a backward pass."""

    forward: Callable[[], tuple[Tensor, ...]]
    backward: Callable[[], list[Tensor | None]]


class Graphs(NamedTuple):
    """Graphs for inputs of one shape.

    Attributes:
        static: Memory that the graphs read.
        passes: Passes by `first`: True if the backward pass overwrites the gradients, False if it adds to them.
    """

    static: StaticInputs
    passes: dict[bool, _Pass]


class CapturedPasses:
    """The passes of a `CapturedStep`, captured for each shape and replayed.

    Args:
        compute: As for a `CapturedStep`.
        parameters: The trained parameters.
        recorder: Returns what captures the passes.
        agreement: With the processes that share the sequences.
        average: As for a `CapturedStep`; the gradients are in the memory of its results.
        may_draw: As for a `CapturedStep`.

    Attributes:
        graphs: The graphs of each shape.
        gradients: Those of the parameters, in the memory that all graphs share; empty before the first capture.
    """

    def __init__(
        self,
        compute: Compute,
        parameters: Sequence[nn.Parameter],
        recorder: Callable[[], Recorder],
        agreement: CaptureAgreement,
        average: GradientAverage | None,
        *,
        may_draw: bool,
    ) -> None:
        self.parameters, self.graphs, self.gradients = parameters, list[Graphs](), list[Tensor | None]()
        self._compute, self._recorder, self._agreement, self._may_draw = compute, recorder, agreement, may_draw
        self._average = average
        self._scale: Tensor | None = None  # gradient of the loss
        self._loss: Tensor | None = None  # with its autograd graph, between the captures of two passes

    def serving(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> Graphs | None:
        """Return the graphs for these inputs; None if there are none."""
        return next((graphs for graphs in self.graphs if graphs.static.serve(inputs, packed)), None)

    def capture(
        self, graphs: Graphs | None, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None, first: bool
    ) -> None:
        """Capture the passes that are missing, and compare a replay with an eager step; overwrites the gradients.

        Args:
            graphs: Those of this shape; None for a new shape.
            inputs: Inputs of `compute`.
            cu_seqlens, first: As for a `CapturedStep`.

        Raises:
            RuntimeError: A pass cannot be captured, or its replay has other results.
        """
        if graphs is None:
            graphs, expected = self._start(inputs, cu_seqlens, first)
        for each in (True,) if first else (True, False):
            if each not in graphs.passes:
                graphs.passes[each] = self._agreement.in_all(partial(self._record, graphs.static, each))
                if each:
                    self._check(graphs.passes[each], expected)

    def replay(
        self, graphs: Graphs, inputs: tuple[Tensor, ...], packed: Documents | None, first: bool
    ) -> tuple[Tensor, ...]:
        """Return the loss, whose `backward` replays the backward pass, and the further results of `compute`."""
        graphs.static.fill(inputs, packed)
        passes = graphs.passes[first]
        loss, *others = passes.forward()
        replayed = _Replay.apply(self._anchor, loss, lambda gradient: self._backward(passes, gradient, first))
        return replayed, *(x.clone() for x in others)

    def _start(self, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None, first: bool) -> tuple[Graphs, Tensor]:
        """Allocate the inputs, and run the step eagerly, so that one-time work precedes the capture.

        Returns:
            The new graphs, and the loss and gradient norm of the eager step with the boundaries of the batch.
        """
        if not self.graphs:
            self._device = self.parameters[0].device
            self._anchor = torch.zeros((), device=self._device, requires_grad=True)
        static = StaticInputs.copied(inputs, cu_seqlens, self._agreement.processes)
        graphs = Graphs(static, {})
        self.graphs.append(graphs)

        def run(cu_seqlens: Tensor | None) -> Tensor:
            self._drop_gradients()
            with self._agreement.joined():
                with casts_not_cached():
                    loss = eager(self._compute, static.inputs, cu_seqlens)[0]
                loss.backward()
            if self._scale is None:
                self._scale = torch.ones_like(loss)
            return _numbers(loss, norm(parameter.grad for parameter in self.parameters))

        before = _random_offset(self._device)

        def check() -> None:
            if (documents := static.documents) is not None and documents.forbidden is not None:
                raise RuntimeError(documents.forbidden)
            if not self._may_draw and _random_offset(self._device) != before:
                raise RuntimeError("activation checkpointing repeats random numbers, which a CUDA graph cannot do")

        with torch.enable_grad():
            # first with padded boundaries, then with those of the batch
            for boundaries in [None] if cu_seqlens is None else [static.cu_seqlens, cu_seqlens]:
                with _random_numbers_kept(self._device):
                    expected = self._recorder().rehearse(partial(run, boundaries))
                    self._agreement.in_all(check)
        self._agreement.add(static, first)
        if self._average is not None:
            self.gradients = list(self._average.allocate([parameter.grad for parameter in self.parameters]))
        self._drop_gradients()
        return graphs, expected

    def _record(self, static: StaticInputs, first: bool) -> _Pass:
        """Capture a forward pass, and the backward pass that writes the gradients, or adds to them."""
        gradients = list(self.gradients)  # if empty, as for the first shape, the backward pass allocates them

        def forward() -> tuple[Tensor, ...]:
            with torch.enable_grad(), casts_not_cached(), self._agreement.joined():
                loss, *others = eager(self._compute, static.inputs, static.cu_seqlens)
            self._loss = loss
            return loss.detach(), *others

        def backward() -> list[Tensor | None]:
            assert self._loss is not None
            if first:
                self._drop_gradients()
            with self._agreement.joined():
                self._loss.backward(self._scale)
            if first and gradients:
                self._move(gradients)
            return [parameter.grad for parameter in self.parameters]

        if not first:
            self._attach()
        passes = _Pass(self._recorder().record(forward), self._recorder().record(backward))
        self._loss = None
        return passes

    def _move(self, shared: list[Tensor | None]) -> None:
        """Copy new gradients to the memory that all graphs share."""
        gradients = [parameter.grad for parameter in self.parameters]
        if [x is None for x in gradients] != [x is None for x in shared]:
            raise RuntimeError("batches of different shapes give gradients to different parameters")
        copy_each([x for x in shared if x is not None], [x for x in gradients if x is not None])
        for parameter, gradient in zip(self.parameters, shared, strict=True):
            parameter.grad = gradient

    def _check(self, passes: _Pass, expected: Tensor) -> None:
        """Raise a RuntimeError if the loss or gradient norm of a replay differs from the eager step."""
        with _random_numbers_kept(self._device):
            loss = passes.forward()[0].clone()
            self._backward(passes, torch.ones_like(loss), True)
        self._agreement.in_all(partial(_compare, _numbers(loss, norm(self.gradients)), expected))

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _backward(self, passes: _Pass, gradient: Tensor, first: bool) -> None:
        """Replay the backward pass from the gradient of the loss."""
        assert self._scale is not None
        self._scale.copy_(gradient)
        if not first:
            self._attach()
        self.gradients = passes.backward()
        for parameter, shared in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = shared

    def _attach(self) -> None:
        """Copy gradients that an eager pass computed to the memory that the graphs use."""
        for parameter, shared in zip(self.parameters, self.gradients, strict=True):
            if shared is None or parameter.grad is shared:
                continue
            if parameter.grad is None:
                shared.zero_()
            else:
                shared.copy_(parameter.grad)
            parameter.grad = shared


class _Replay(torch.autograd.Function):
    """The loss of a replayed forward pass; its backward replays the captured backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.replay = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.replay(gradient)
        return None, None, None


def norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """Return the total norm of the gradients that are not None."""
    return total_norm(gradient for gradient in gradients if gradient is not None)


def _compare(replayed: Tensor, expected: Tensor) -> None:
    """Raise a RuntimeError if the numbers of a replay differ from those of the eager step."""
    if not torch.allclose(replayed, expected, rtol=TOLERANCE, atol=0.0, equal_nan=True):
        (loss, norm), (expected_loss, expected_norm) = replayed.tolist(), expected.tolist()
        raise RuntimeError(
            f"a replay has the loss {loss:g} and the gradient norm {norm:g}, where the eager step has "
            f"{expected_loss:g} and {expected_norm:g}"
        )


def _numbers(loss: Tensor, norm: Tensor) -> Tensor:
    return torch.stack([loss.detach().float(), norm.float()])


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Restore the state of the random numbers after the block."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _random_offset(device: torch.device) -> int:
    """Return the offset of the random generator of a GPU; 0 on other devices."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index].get_offset()


class CapturedForward:
    """CUDA graphs of a function without gradients, such as the losses of a validation batch.

    A graph is captured at the first call for each shape of the inputs and packed documents, as by a `CapturedStep`, and
    a replay is compared with the eager result. Inputs of other shapes than the first MOST_SHAPES run eagerly. If the
    function cannot be captured, every call runs eagerly, and the log says so.

    Args:
        compute: Inputs, and `cu_seqlens` if documents are packed → tensors. It must not wait for the device.
        parameters: All parameters that `compute` uses.
        recorder: As for a `CapturedStep`; graphs of the same recorder share memory.
        failed: Called if the function cannot be captured.

    Attributes:
        refused: Reason why everything runs eagerly; None if nothing failed.
    """

    def __init__(
        self,
        compute: Compute,
        parameters: Iterable[nn.Parameter],
        recorder: Recorder,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._compute, self._parameters, self._recorder, self._failed = compute, list(parameters), recorder, failed
        self.refused: str | None = None
        self._memory = addresses(self._parameters)
        self._graphs: list[tuple[StaticInputs, Callable[[], tuple[Tensor, ...]]]] = []

    def __call__(self, *inputs: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the results as new tensors; the arguments are those of a `CapturedStep`."""
        if self._memory != (memory := addresses(self._parameters)):
            self._memory, self._graphs = memory, []  # parameters were moved
        packed = packed_documents(inputs, cu_seqlens)
        graph = next((each for each in self._graphs if each[0].serve(inputs, packed)), None)
        if graph is None and self.refused is None and len(self._graphs) < MOST_SHAPES:
            graph = self._capture(inputs, cu_seqlens)
        if graph is None:
            return eager(self._compute, inputs, cu_seqlens)
        static, replay = graph
        static.fill(inputs, packed)
        return tuple(x.clone() for x in replay())

    def _capture(
        self, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None
    ) -> tuple[StaticInputs, Callable[[], tuple[Tensor, ...]]] | None:
        """Capture and check a graph for inputs of this shape; return None if that fails."""
        with torch.inference_mode(False), torch.no_grad(), casts_not_cached():
            static = StaticInputs.copied(inputs, cu_seqlens)
            step = partial(eager, self._compute, static.inputs)
            try:
                # first with padded boundaries, then with those of the batch
                expected = self._recorder.rehearse(partial(step, static.cu_seqlens))
                expected = expected if cu_seqlens is None else self._recorder.rehearse(partial(step, cu_seqlens))
                replay = self._recorder.record(partial(step, static.cu_seqlens))
                pairs = zip(replay(), expected, strict=True)
                if not all(torch.allclose(x.float(), y.float(), rtol=TOLERANCE, equal_nan=True) for x, y in pairs):
                    raise RuntimeError("a replay has other results than the eager forward pass")
            except RuntimeError as error:
                self._graphs.clear()
                self._failed()
                self.refused = first_line(error)
                log.warning("cuda_graph: validation runs eagerly: %s", self.refused)
                return None
        self._graphs.append((static, replay))
        return self._graphs[-1]
