"""Agreement of the processes that share sequences on what they capture as CUDA graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from kernels.core.documents import Documents
from kernels.core.static_documents import StaticDocuments
from mixers import ContextParallel
from zoo.generation.cuda_graph import Made
from zoo.train.static_inputs import MOST_SHAPES, Shape, StaticInputs, fit, shape_of


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
            reason = self._sharing.first_reason(one_line(error))
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


def one_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
