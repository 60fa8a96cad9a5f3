"""A training step as CUDA graphs, which replace hundreds of kernel launches by a few."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kernels.core.documents import Documents, documents
from kernels.core.static_documents import StaticDocuments, static_copy, static_documents
from mixers import ContextParallel
from zoo.generation.cuda_graph import Recorder, casts_not_cached
from zoo.train.adamw import AdamW
from zoo.train.gradient_average import GradientAverage
from zoo.train.muon import Muon
from zoo.train.optim import clip, total_norm

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Compute = Callable[..., tuple[Tensor, ...]]
Key = tuple[tuple[torch.Size, torch.dtype], ...]  # shapes and dtypes of the inputs
TOLERANCE = 1e-3  # relative, of a replay to the eager step; some kernels sum in varying order
# Each shape costs an eager step, two captures, a replay and the memory of its graphs. Tasks of a few lengths have fewer
# shapes than this. With arbitrary lengths, most steps of a run would be captures, and replays would be rare.
MOST_SHAPES = 8


class Recording(Protocol):
    """The interface of `zoo.generation.cuda_graph.Recorder`."""

    def rehearse(self, work: Callable[[], Made]) -> Made:
        """Run work that is required before a capture."""

    def record(self, step: Callable[[], Made]) -> Callable[[], Made]:
        """Capture a step; all its replays write to the same tensors."""


class _Refused(RuntimeError):
    """A process that shares the sequences cannot capture a part; raised in all of them."""


class _Pass(NamedTuple):
    """Replays of a forward and a backward pass."""

    forward: Callable[[], tuple[Tensor, ...]]
    backward: Callable[[], list[Tensor | None]]


class _Shapes(NamedTuple):
    """Graphs for inputs of the same shapes.

    Attributes:
        inputs: Memory that the graphs read.
        cu_seqlens: Boundaries of packed documents that the graphs read, from `static_copy`; None without documents.
        passes: Passes by `first`: True if the backward pass overwrites the gradients, False if it adds to them.
    """

    inputs: tuple[Tensor, ...]
    cu_seqlens: Tensor | None
    passes: dict[bool, _Pass]

    @classmethod
    def copied(cls, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> "_Shapes":
        """Return the shapes of new tensors and a padded copy of the boundaries, without passes."""
        return cls(inputs, None if cu_seqlens is None else static_copy(cu_seqlens, inputs[0].shape[1]), {})

    @property
    def documents(self) -> StaticDocuments | None:
        return None if self.cu_seqlens is None else static_documents(self.cu_seqlens, self.inputs[0].shape[1])

    def serve(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> bool:
        """Return whether the graphs compute the step of these inputs and documents."""
        own = self.documents
        if own is None or packed is None:
            return own is packed and _key(self.inputs) == _key(inputs)
        return own.fits(packed) and _key(self.inputs) == _key(inputs)

    def fill(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> None:
        """Copy inputs and documents to where the graphs read them."""
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        if (own := self.documents) is not None and packed is not None:
            own.fill(packed)


class _Agreement(NamedTuple):
    """A shape that processes which share sequences capture together.

    Attributes:
        key: That of the inputs.
        documents: Packed documents of the shape; None without documents.
        passes: Kinds of pass (`first`) that the processes have already voted on.
    """

    key: Key
    documents: StaticDocuments | None
    passes: set[bool]

    def covers(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> bool:
        """Return whether these inputs and documents have this shape."""
        alike = packed is None if self.documents is None else packed is not None and self.documents.fits(packed)
        return alike and self.key == _key(inputs)


class CapturedStep:
    """A loss and its backward pass, the gradient norm, clipping and the optimiser's update, each as a CUDA graph.

    Each part has a graph, so that code between the parts of an eager step also runs between the replays, on the same
    tensors: hooks of the loss, callbacks that read or change gradients, a skipped update. Each part is captured when it
    is first used, and the passes once for each shape of the inputs. All shapes share the memory of the gradients. The
    shape of packed documents includes their number, rounded up to a power of two, and whether they are long enough for
    other launches (`StaticDocuments`). The first `prepare` for a shape also runs the step eagerly, compares a replay
    with it, and discards the gradients of both. Batches of other shapes than the first MOST_SHAPES run eagerly, with
    the same results. If a part cannot be captured, every step runs eagerly. The log says so once.

    Processes that share sequences send each other messages within the passes, in the same order whether they replay
    them or not. So all of them must get batches of the same shapes, and they agree whether to run further passes: they
    capture a shape together, or none of them captures more. An error in an eager pass is raised, since the other
    processes wait for its messages.

    Args:
        compute: Inputs → a scalar loss, and further tensors without gradients. It must not wait for the device.
        parameters: All parameters that `compute` uses. The gradients of trained ones stay at the same addresses.
        recorder: Captures the parts; None for CUDA graphs.
        average: Averages the gradients over all processes, before their norm; None for one process.
        sharing: The processes that share each sequence in `compute`; None if it exchanges nothing.
        may_draw: Whether `compute` may draw random numbers on the device; False if it recomputes activations.

    Attributes:
        refused: Reason why everything runs eagerly; None if nothing failed.
    """

    def __init__(
        self,
        compute: Compute,
        parameters: Iterable[nn.Parameter],
        recorder: Recording | None = None,
        average: GradientAverage | None = None,
        sharing: ContextParallel | None = None,
        *,
        may_draw: bool = True,
    ) -> None:
        self.refused: str | None = None
        self._average, self._sharing = average, sharing
        self._agreed, self._all_refused = list[_Agreement](), False
        self._exchanges = 0  # the first one is eager: it connects the processes
        self._compute, self._all, self._may_draw = compute, list(parameters), may_draw
        self._recorder = recorder
        self.forget()
        self._odd_shapes_reported = self._odd_update_reported = False

    def forget(self) -> None:
        """Drop all graphs, which are captured again when they are used."""
        self._parameters = [parameter for parameter in self._all if parameter.requires_grad]
        self._memory = _addresses(self._all)
        self._shapes: list[_Shapes] = []
        self._gradients: list[Tensor | None] = []
        self._scale: Tensor | None = None  # gradient of the loss
        if self._average is not None:
            self._average.forget()
        self._loss: Tensor | None = None  # with its autograd graph, between the captures of two passes
        self._exchange: Callable[[], None] | None = None
        self._norm: Callable[[], Tensor] | None = None
        self._clip: Callable[[], None] | None = None
        self._update: Callable[[], None] | None = None
        self._settings: Any = None  # of the optimiser, when its update was captured

    def prepare(self, *inputs: Tensor, cu_seqlens: Tensor | None = None, first: bool = True) -> None:
        """Capture the passes for inputs of this shape unless that is done; call it before each forward pass.

        Args:
            inputs: Inputs of `compute`.
            cu_seqlens, first: As in `__call__`.
        """
        if self._memory != _addresses(self._all):
            self.forget()  # parameters were moved, frozen or unfrozen
            self._agreed, self._all_refused = [], False
        packed = _documents(inputs, cu_seqlens)
        self._agree(inputs, packed, first)
        shapes = self._serving(inputs, packed)
        done = shapes is not None and first in shapes.passes and True in shapes.passes
        if self.refused is not None or done or (shapes is None and not self._has_room()):
            return
        attached = [parameter.grad for parameter in self._parameters]
        values = [None if gradient is None or first else gradient.clone() for gradient in attached]
        try:
            if shapes is None:
                shapes, expected = self._start(inputs, cu_seqlens, first)
            for each in (True,) if first else (True, False):
                if each not in shapes.passes:
                    shapes.passes[each] = self._in_all(partial(self._record_pass, shapes, each))
                    if each:
                        self._check(shapes.passes[each], expected)
        except RuntimeError as error:
            if self._sharing is not None and not isinstance(error, _Refused):
                raise
            self._refuse(_one_line(error))
        for parameter, gradient, value in zip(self._parameters, attached, values, strict=True):
            parameter.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)  # the check overwrote the gradients, which all shapes share

    def __call__(self, *inputs: Tensor, cu_seqlens: Tensor | None = None, first: bool = True) -> tuple[Tensor, ...]:
        """Return the loss, whose `backward` replays the backward pass, and the further results of `compute`.

        Args:
            inputs: Inputs of `compute`; the first is [B,T,…] if documents are packed.
            cu_seqlens: Boundaries [N+1] of packed documents, passed to `compute` by this name; None without documents.
            first: Whether the backward pass overwrites the gradients; False to accumulate them.
        """
        packed = _documents(inputs, cu_seqlens)
        shapes = self._serving(inputs, packed)
        if shapes is None or first not in shapes.passes:
            return _eager(self._compute, inputs, cu_seqlens)
        shapes.fill(inputs, packed)
        passes = shapes.passes[first]
        loss, *others = passes.forward()
        replayed = _Replay.apply(self._anchor, loss, lambda gradient: self._backward(passes, gradient, first))
        return replayed, *(x.clone() for x in others)

    def _agree(self, inputs: tuple[Tensor, ...], packed: Documents | None, first: bool) -> None:
        """Before the first batch of a shape, refuse if a process that shares the sequences has refused.

        A process that refused keeps voting until all have refused, so it keeps the list of agreed shapes.
        """
        if self._sharing is None or self._all_refused:
            return
        agreed = next((each for each in self._agreed if each.covers(inputs, packed)), None)
        if first in agreed.passes if agreed is not None else len(self._agreed) == MOST_SHAPES:
            return
        reason = self._sharing.first_reason(self.refused)
        self._all_refused = reason is not None
        if reason is not None and self.refused is None:
            self._refuse(reason)
        if agreed is not None:
            agreed.passes.add(first)

    def _in_all(self, step: Callable[[], Made]) -> Made:
        """Return the result of a step that exchanges nothing, unless it fails in a process that shares the sequences.

        Raises:
            _Refused: It failed in one of the processes that share the sequences.
            Exception: It failed in this process, by an error that does not mean that it cannot be captured.
        """
        if self._sharing is None:
            return step()
        try:
            result = step()
        except Exception as error:  # whatever it is, the other processes must not wait for this one
            reason = self._sharing.first_reason(_one_line(error))
            if isinstance(error, RuntimeError) and reason is not None:
                raise _Refused(reason) from None
            raise
        if (reason := self._sharing.first_reason(None)) is not None:
            raise _Refused(reason)
        return result

    def _joined(self) -> AbstractContextManager[None]:
        """Return a context for a pass, at whose end the messages that this process sent have been received."""
        return nullcontext() if self._sharing is None else self._sharing.joined()

    def _serving(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> _Shapes | None:
        """Return the graphs for these inputs; None if there are none."""
        return next((shapes for shapes in self._shapes if shapes.serve(inputs, packed)), None)

    def _has_room(self) -> bool:
        """Return whether another shape may be captured; if not, say so once in the log."""
        if len(self._shapes) < MOST_SHAPES:
            return True
        if not self._odd_shapes_reported:
            self._odd_shapes_reported = True
            log.warning("cuda_graph: batches of other shapes than the first %d run eagerly", MOST_SHAPES)
        return False

    def _start(self, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None, first: bool) -> tuple[_Shapes, Tensor]:
        """Allocate the inputs, and run the step eagerly, so that one-time work precedes the capture.

        Returns:
            The new shapes, and the loss and gradient norm of the eager step with the boundaries of the batch.
        """
        if not self._shapes:
            self._start_first()
        assert self._recorder is not None
        shapes = _Shapes.copied(tuple(x.detach().clone() for x in inputs), cu_seqlens)
        self._shapes.append(shapes)

        def eager(cu_seqlens: Tensor | None) -> Tensor:
            self._drop_gradients()
            with self._joined():
                with casts_not_cached():
                    loss = _eager(self._compute, shapes.inputs, cu_seqlens)[0]
                loss.backward()
            if self._scale is None:
                self._scale = torch.ones_like(loss)
            return _numbers(loss, _norm(parameter.grad for parameter in self._parameters))

        before = _random_offset(self._device)

        def check() -> None:
            if (static := shapes.documents) is not None and static.forbidden is not None:
                raise RuntimeError(static.forbidden)
            if not self._may_draw and _random_offset(self._device) != before:
                raise RuntimeError("activation checkpointing repeats random numbers, which a CUDA graph cannot do")

        with torch.enable_grad():
            # first with padded boundaries, then with those of the batch
            for boundaries in [None] if cu_seqlens is None else [shapes.cu_seqlens, cu_seqlens]:
                with _random_numbers_kept(self._device):
                    expected = self._recorder.rehearse(partial(eager, boundaries))
                    self._in_all(check)
        if self._sharing is not None:
            if (static := shapes.documents) is not None:
                for answers in self._sharing.gathered(static.answers()):
                    static.require(answers)
            self._agreed.append(_Agreement(_key(inputs), shapes.documents, {first}))
        self._drop_gradients()
        return shapes, expected

    def _start_first(self) -> None:
        """Allocate the tensors that the graphs of all shapes share."""
        device = self._parameters[0].device
        self._device = device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._max_norm = 0.0
        self._clipped_norm = torch.zeros((), device=device)
        self._found_inf = torch.zeros((), device=device)
        self._recorder = Recorder(device) if self._recorder is None else self._recorder

    def _record_pass(self, shapes: _Shapes, first: bool) -> _Pass:
        """Capture a forward pass, and the backward pass that writes the gradients, or adds to them."""
        assert self._recorder is not None
        statics = list(self._gradients)  # empty for the first shape, whose backward pass allocates them

        def forward() -> tuple[Tensor, ...]:
            with torch.enable_grad(), casts_not_cached(), self._joined():
                loss, *others = _eager(self._compute, shapes.inputs, shapes.cu_seqlens)
            self._loss = loss
            return loss.detach(), *others

        def backward() -> list[Tensor | None]:
            assert self._loss is not None
            if first:
                self._drop_gradients()
            with self._joined():
                self._loss.backward(self._scale)
            if first and statics:
                self._move(statics)
            return [parameter.grad for parameter in self._parameters]

        if not first:
            self._attach()
        passes = _Pass(self._recorder.record(forward), self._recorder.record(backward))
        self._loss = None
        return passes

    def _move(self, statics: list[Tensor | None]) -> None:
        """Copy new gradients to the memory of the first shape's graphs."""
        gradients = [parameter.grad for parameter in self._parameters]
        if [x is None for x in gradients] != [x is None for x in statics]:
            raise RuntimeError("batches of different shapes give gradients to different parameters")
        torch._foreach_copy_([x for x in statics if x is not None], [x for x in gradients if x is not None])
        for parameter, static in zip(self._parameters, statics, strict=True):
            parameter.grad = static

    def _check(self, passes: _Pass, expected: Tensor) -> None:
        """Raise a RuntimeError if the loss or gradient norm of a replay differs from the eager step."""
        with _random_numbers_kept(self._device):
            loss = passes.forward()[0].clone()
            self._backward(passes, torch.ones_like(loss), True)
        self._in_all(partial(_compare, _numbers(loss, _norm(self._gradients)), expected))

    def _refuse(self, reason: str) -> None:
        self.forget()
        self.refused = reason
        log.warning("cuda_graph: the training step runs eagerly: %s", reason)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _backward(self, passes: _Pass, gradient: Tensor, first: bool) -> None:
        """Replay the backward pass from the gradient of the loss."""
        assert self._scale is not None
        self._scale.copy_(gradient)
        if not first:
            self._attach()
        self._gradients = passes.backward()
        for parameter, static in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = static

    def _attach(self) -> None:
        """Copy gradients that an eager pass computed to the memory that the graphs use."""
        for parameter, static in zip(self._parameters, self._gradients, strict=True):
            if static is None or parameter.grad is static:
                continue
            if parameter.grad is None:
                static.zero_()
            else:
                static.copy_(parameter.grad)
            parameter.grad = static

    def _attached(self) -> bool:
        """Return whether the gradients are in the memory that the graphs use."""
        gradients = self._gradients if self._average is None else self._average.results
        pairs = zip(self._parameters, gradients, strict=True)
        return bool(self._gradients and gradients) and all(parameter.grad is static for parameter, static in pairs)

    def _exchanged(self) -> None:
        """Replace the gradients by their means over all processes; each process calls it once a step."""
        assert self._average is not None
        own = [parameter.grad for parameter in self._parameters]
        self._average.allocate(own)
        in_graph = bool(self._gradients) and all(x is static for x, static in zip(own, self._gradients, strict=True))
        if in_graph and self._exchange is None and self._exchanges:
            average, gradients = self._average, list(self._gradients)
            self._exchange = self._recorded(lambda: average(gradients))
        self._exchanges += 1
        if in_graph and self._exchange is not None:
            self._exchange()
        else:
            self._average(own)
        for parameter, mean in zip(self._parameters, self._average.results, strict=True):
            parameter.grad = mean

    @property
    def parts(self) -> int:
        """Number of graphs captured so far."""
        passes = sum(len(shapes.passes) for shapes in self._shapes)
        return 2 * passes + sum(part is not None for part in (self._exchange, self._norm, self._clip, self._update))

    def gradient_norm(self) -> Tensor:
        """Return the total norm of the gradients, a scalar; with several processes, average them first."""
        if self._average is not None:
            self._exchanged()
        return self._present_norm()

    def _present_norm(self) -> Tensor:
        if not self._attached():
            return _norm(parameter.grad for parameter in self._parameters)
        if self._norm is None:
            gradients = [parameter.grad for parameter in self._parameters]
            self._norm = self._recorded(lambda: _norm(gradients))
        return self._present_norm() if self._norm is None else self._norm().clone()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose total norm is `norm`, to a norm of at most `max_norm`."""
        if not self._attached() or (self._clip is not None and max_norm != self._max_norm):
            clip([parameter for parameter in self._parameters if parameter.grad is not None], max_norm, norm)
            return
        if self._clip is None:
            self._max_norm, self._clipped_norm = max_norm, norm.clone()
            parameters = [parameter for parameter in self._parameters if parameter.grad is not None]
            self._clip = self._recorded(lambda: clip(parameters, max_norm, self._clipped_norm))
        if self._clip is None:
            self.clip(max_norm, norm)
            return
        self._clipped_norm.copy_(norm)
        self._clip()

    def update(self, optimizer: AdamW | Muon) -> bool:
        """Replay the optimiser's update and return True; return False if it has to run eagerly."""
        if not self._attached():
            return False
        if self._update is None:
            updated = [parameter for parameter in self._parameters if parameter.grad is not None]
            if not all(optimizer.state[parameter] for parameter in updated):
                return False  # the first update allocates the optimiser's state
            self._settings = optimizer.settings()
            found_inf, optimizer.found_inf = optimizer.found_inf, self._found_inf
            self._update = self._recorded(lambda: optimizer.update(captured=True))
            optimizer.found_inf = found_inf
        if self._update is None or self._settings != optimizer.settings():
            if self._update is not None and not self._odd_update_reported:
                self._odd_update_reported = True
                log.warning("cuda_graph: the update runs eagerly, since settings other than the learning rate change")
            return False
        if optimizer.found_inf is None:
            self._found_inf.zero_()
        else:
            self._found_inf.copy_(optimizer.found_inf)
        self._update()
        return True

    def _recorded(self, step: Callable[[], Made]) -> Callable[[], Made] | None:
        """Return the replay of a step; if it cannot be captured, return None and run everything eagerly from now on."""
        assert self._recorder is not None
        try:
            return self._recorder.record(step)
        except RuntimeError as error:
            self._refuse(_one_line(error))
            return None


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
        recorder: Recording,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._compute, self._parameters, self._recorder, self._failed = compute, list(parameters), recorder, failed
        self.refused: str | None = None
        self._memory = _addresses(self._parameters)
        self._graphs: list[tuple[_Shapes, Callable[[], tuple[Tensor, ...]]]] = []

    def __call__(self, *inputs: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the results as new tensors; the arguments are those of a `CapturedStep`."""
        if self._memory != (memory := _addresses(self._parameters)):
            self._memory, self._graphs = memory, []  # parameters were moved
        packed = _documents(inputs, cu_seqlens)
        graph = next((each for each in self._graphs if each[0].serve(inputs, packed)), None)
        if graph is None and self.refused is None and len(self._graphs) < MOST_SHAPES:
            graph = self._capture(inputs, cu_seqlens)
        if graph is None:
            return _eager(self._compute, inputs, cu_seqlens)
        shapes, replay = graph
        shapes.fill(inputs, packed)
        return tuple(x.clone() for x in replay())

    def _capture(
        self, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None
    ) -> tuple[_Shapes, Callable[[], tuple[Tensor, ...]]] | None:
        """Capture and check a graph for inputs of this shape; return None if that fails."""
        with torch.inference_mode(False), torch.no_grad(), casts_not_cached():
            shapes = _Shapes.copied(tuple(x.clone() for x in inputs), cu_seqlens)
            step = partial(_eager, self._compute, shapes.inputs)
            try:
                # first with padded boundaries, then with those of the batch
                expected = self._recorder.rehearse(partial(step, shapes.cu_seqlens))
                expected = expected if cu_seqlens is None else self._recorder.rehearse(partial(step, cu_seqlens))
                replay = self._recorder.record(partial(step, shapes.cu_seqlens))
                pairs = zip(replay(), expected, strict=True)
                if not all(torch.allclose(x.float(), y.float(), rtol=TOLERANCE, equal_nan=True) for x, y in pairs):
                    raise RuntimeError("a replay has other results than the eager forward pass")
            except RuntimeError as error:
                self._graphs.clear()
                self._failed()
                self.refused = _one_line(error)
                log.warning("cuda_graph: validation runs eagerly: %s", self.refused)
                return None
        self._graphs.append((shapes, replay))
        return self._graphs[-1]


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


def _eager(compute: Compute, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    return compute(*inputs) if cu_seqlens is None else compute(*inputs, cu_seqlens=cu_seqlens)


def _norm(gradients: Iterable[Tensor | None]) -> Tensor:
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


def _addresses(parameters: Iterable[nn.Parameter]) -> list[tuple[int, bool]]:
    return [(parameter.data_ptr(), parameter.requires_grad) for parameter in parameters]


def _documents(inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> Documents | None:
    """Return the documents that are packed into the first input; None if there are none."""
    return None if cu_seqlens is None else documents(cu_seqlens, inputs[0].shape[1], len(inputs[0]))


def _key(inputs: Iterable[Tensor]) -> Key:
    return tuple((x.shape, x.dtype) for x in inputs)


def _one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
