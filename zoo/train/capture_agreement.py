"""Agreement of the processes that share sequences on what they capture as CUDA graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

from torch import Tensor

from kernels.core.documents import Documents
from kernels.core.static_documents import StaticDocuments
from mixers import ContextParallel
from zoo.train.static_inputs import MOST_SHAPES, Shape, StaticInputs, fit, shape_of

Made = TypeVar("Made")


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
        """Before the first batch of a shape, return the reason of a process that has refused; None if there is none.

        `refused` is the reason of this process. One that refused keeps voting until all have refused, so it keeps the
        list of agreed shapes.
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
            Exception: It failed in this process, by an error that does not mean that it cannot be captured.
        """
        if self._sharing is None:
            return step()
        try:
            result = step()
        except Exception as error:  # whatever it is, the other processes must not wait for this one
            reason = self._sharing.first_reason(one_line(error))
            if isinstance(error, RuntimeError) and reason is not None:
                raise Refused(reason) from None
            raise
        if (reason := self._sharing.first_reason(None)) is not None:
            raise Refused(reason)
        return result

    def joined(self) -> AbstractContextManager[None]:
        """Return a context for a pass, at whose end the messages that this process sent have been received."""
        return nullcontext() if self._sharing is None else self._sharing.joined()

    def add(self, static: StaticInputs, first: bool) -> None:
        """Add a shape that all processes have run eagerly, whose graphs then depend on the answers of all of them."""
        if self._sharing is None:
            return
        if (documents := static.documents) is not None:
            for answers in self._sharing.gathered(documents.answers()):
                documents.require(answers)
        self._shapes.append(_AgreedShape(shape_of(static.inputs), static.documents, {first}))


def one_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
