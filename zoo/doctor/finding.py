"""The result of a check."""

import math
from typing import Any, Literal, NamedTuple

Status = Literal["passed", "noted", "failed"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        subject: What was examined: `packages`, `GPU`, an op, a mixer …
        check: What about it: `versions`, `fp32`, `packed` …
        status: `noted` is worth knowing, and no failure.
        says: The result in words.
        numbers: The result in numbers, for JSON.
    """

    subject: str
    check: str
    status: Status
    says: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.subject}, {self.check}: {self.says}"


def found(subject: str, check: str, passed: bool, says: str, **numbers: Any) -> Finding:
    """A finding that passed or failed; numbers that are not finite are null, for JSON."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in numbers.items()}
    return Finding(subject, check, "passed" if passed else "failed", says, finite)
