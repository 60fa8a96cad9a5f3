"""Memory that CUDA graphs read and write, and the agreement of processes on what they capture."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels import UserError
from kernels.core.documents import Documents, documents
from kernels.core.static_documents import StaticDocuments, static_copy, static_documents
from kernels.core.torch_internals import copy_each
from mixers import ContextParallel
from zoo.arguments import first_line
from zoo.generation.cuda_graph import Made

Compute = Callable[..., tuple[Tensor, ...]]
Shape = tuple[tuple[torch.Size, torch.dtype], ...]  # shapes and dtypes of the inputs
# Each shape costs an eager step, two captures, a replay and the memory of its graphs. Tasks of a few lengths have fewer
# shapes than this. With arbitrary lengths, most steps of a run would be captures, and replays would be rare.
MOST_SHAPES = 8
# A separately allocated gradient starts at a multiple of 512 bytes. The norm of one at another place is summed in
# another order, so that clipping, and with it the captured run, would differ from the eager one in the last bit.
ALIGNED = 512


class StaticInputs(NamedTuple):
    """Memory that the graphs for inputs of one shape read.

    Attributes:
        inputs: The inputs.
        cu_seqlens: Boundaries of packed documents, from `static_copy`; None without documents.
    """

    inputs: tuple[Tensor, ...]
    cu_seqlens: Tensor | None

    @classmethod
    def copied(cls, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None, parts: int = 1) -> "StaticInputs":
        """Return copies of the inputs, and a padded copy of the boundaries for so many processes that share the row."""
        copies = tuple(x.detach().clone() for x in inputs)
        return cls(copies, None if cu_seqlens is None else static_copy(cu_seqlens, inputs[0].shape[1], parts))

    @property
    def documents(self) -> StaticDocuments | None:
        return None if self.cu_seqlens is None else static_documents(self.cu_seqlens, self.inputs[0].shape[1])

    def serve(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> bool:
        """Return whether the graphs compute the step of these inputs and documents."""
        return fit(shape_of(self.inputs), self.documents, inputs, packed)

    def fill(self, inputs: tuple[Tensor, ...], packed: Documents | None) -> None:
        """Copy inputs and documents to where the graphs read them."""
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        if (own := self.documents) is not None and packed is not None:
            own.fill(packed)


def fit(shape: Shape, static: StaticDocuments | None, inputs: tuple[Tensor, ...], packed: Documents | None) -> bool:
    """Return whether inputs and documents have this shape."""
    alike = packed is None if static is None else packed is not None and static.fits(packed)
    return alike and shape == shape_of(inputs)


def shape_of(inputs: Iterable[Tensor]) -> Shape:
    return tuple((x.shape, x.dtype) for x in inputs)


def packed_documents(inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> Documents | None:
    """Return the documents that are packed into the first input; None if there are none."""
    return None if cu_seqlens is None else documents(cu_seqlens, inputs[0].shape[1], len(inputs[0]))


def eager(compute: Compute, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Call a function of inputs, and of boundaries if documents are packed."""
    return compute(*inputs) if cu_seqlens is None else compute(*inputs, cu_seqlens=cu_seqlens)


def addresses(parameters: Iterable[nn.Parameter]) -> list[tuple[int, bool]]:
    """Return where each parameter is, and whether it is trained: graphs are valid as long as neither changes."""
    return [(parameter.data_ptr(), parameter.requires_grad) for parameter in parameters]


class GradientAverage:
    """Averages the gradients of all processes in memory that stays the same, as a CUDA graph needs.

    The gradients of captured passes are already there, so that only those of eager passes are copied.

    Attributes:
        results: The means; None for a parameter without a gradient.
    """

    def __init__(self) -> None:
        self.results: list[Tensor | None] = []
        self._flat: list[Tensor] = []
        self._compared = False

    def forget(self) -> None:
        """Drop the results, for other parameters; all processes must call it."""
        self.results, self._flat, self._compared = [], [], False

    def allocate(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the results, allocated for such gradients unless that is done."""
        if self.results:
            return self.results
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        places: list[int] = []
        for gradient in gradients:
            if gradient is None:
                places.append(0)
                continue
            kind = gradient.dtype, gradient.device
            places.append(sizes.get(kind, 0))
            step = ALIGNED // gradient.element_size()
            sizes[kind] = places[-1] + -(-gradient.numel() // step) * step
        flat = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        self._flat = list(flat.values())
        self.results = [
            None if x is None else flat[x.dtype, x.device][place : place + x.numel()].view(x.shape)
            for x, place in zip(gradients, places, strict=True)
        ]
        return self.results

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute the results; all processes must call it. A gradient that only this process lacks counts as 0.

        Raises:
            UserError: A gradient was missing when the results were allocated, or in the first step only some processes
                have a gradient of a parameter.
        """
        self.allocate(gradients)
        if not self._agrees(gradients):
            raise UserError(
                "cuda_graph: captured steps of several processes require gradients of the same parameters in every "
                "step; use trainer.strategy=ddp_find_unused_parameters_true, whose steps are not captured"
            )
        for result, gradient in zip(self.results, gradients, strict=True):
            if result is not None and gradient is None:
                result.zero_()
        pairs = [
            (result, gradient)
            for result, gradient in zip(self.results, gradients, strict=True)
            if result is not None and gradient is not None and result is not gradient
        ]
        if pairs:
            copy_each([result for result, _ in pairs], [gradient for _, gradient in pairs])
        for flat in self._flat:
            if dist.get_backend() == "nccl" and flat.dtype == torch.float32:  # NCCL rounds 1/n to the dtype
                dist.all_reduce(flat, dist.ReduceOp.AVG)
            else:  # Gloo has only sums
                flat.mul_(1 / dist.get_world_size())
                dist.all_reduce(flat)

    def _agrees(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether no gradient lacks a result and, in the first step, all processes have the same results."""
        extra = [x is None and gradient is not None for x, gradient in zip(self.results, gradients, strict=True)]
        if self._compared:
            return not any(extra)
        self._compared = True
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        # with one half for an extra gradient, the sum is neither 0 nor the number of processes
        present = [0.5 if more else float(x is not None) for more, x in zip(extra, self.results, strict=True)]
        total = torch.tensor(present, device=device)
        dist.all_reduce(total)
        return bool(((total == 0) | (total == dist.get_world_size())).all())


class Refused(RuntimeError):
    """A process that shares the sequences cannot capture a part; raised in all of them."""


class _AgreedShape(NamedTuple):
    """A shape that processes which share sequences capture together.

    Attributes:
        shape: That of the inputs.
        documents: Packed documents of the shape; None without documents.
        passes: Kinds of pass (`first`) that the processes have already voted on.
    """

    shape: Shape
    documents: StaticDocuments | None
    passes: set[bool]


class CaptureAgreement:
    """The votes of the processes that share each sequence; a process that shares none decides alone.

    Each vote is `ContextParallel.first_reason`: all processes pass their reason against the capture, and all get the
    first one.

    Args:
        sharing: The processes that share each sequence; None for none.

    Attributes:
        processes: Their number.
    """

    def __init__(self, sharing: ContextParallel | None) -> None:
        self._sharing, self.processes = sharing, 1 if sharing is None else sharing.count
        self.forget()

    def forget(self) -> None:
        """Drop the agreed shapes; all processes must do so together."""
        self._shapes = list[_AgreedShape]()
        self._all_refused = False

    def must_raise(self, error: RuntimeError) -> bool:
        """Return whether an error must be raised, since other processes wait for messages of this one."""
        return self._sharing is not None and not isinstance(error, Refused)

    def vote(
        self, inputs: tuple[Tensor, ...], packed: Documents | None, first: bool, refused: str | None
    ) -> str | None:
        """Return why a process refuses to capture; None if none does. Only the first batch of a shape needs a vote.

        `refused` is the reason of this process. A process that refused still has to vote until all have refused, and
        therefore still needs the list of agreed shapes.
        """
        if self._sharing is None or self._all_refused:
            return None
        agreed = next((each for each in self._shapes if fit(each.shape, each.documents, inputs, packed)), None)
        if first in agreed.passes if agreed is not None else len(self._shapes) == MOST_SHAPES:
            return None
        reason = self._sharing.first_reason(refused)
        self._all_refused = reason is not None
        if agreed is not None:
            agreed.passes.add(first)
        return reason

    def in_all(self, step: Callable[[], Made]) -> Made:
        """Return the result of a step that exchanges nothing, unless it fails in a process that shares the sequences.

        Raises:
            Refused: It failed in one of the processes that share the sequences.
            Exception: It failed in this process, and not with a RuntimeError, which is raised as Refused.
        """
        if self._sharing is None:
            return step()
        try:
            result = step()
        except Exception as error:  # whatever it is, the other processes must not wait for this one
            reason = self._sharing.first_reason(first_line(error))
            if isinstance(error, RuntimeError) and reason is not None:
                raise Refused(reason) from None
            raise
        if (reason := self._sharing.first_reason(None)) is not None:
            raise Refused(reason)
        return result

    def joined(self) -> AbstractContextManager[None]:
        """Return a context for a pass. It ends when all messages that this process sent in it have been received."""
        return nullcontext() if self._sharing is None else self._sharing.joined()

    def add(self, static: StaticInputs, first: bool) -> None:
        """Add a shape that all processes have run eagerly. Its graphs then serve what gives the same answers in all."""
        if self._sharing is None:
            return
        if (documents := static.documents) is not None:
            for answers in self._sharing.gathered(documents.answers()):
                documents.require(answers)
        self._shapes.append(_AgreedShape(shape_of(static.inputs), static.documents, {first}))
