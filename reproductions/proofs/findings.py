"""Findings of proofs, in the form of `zoo doctor`."""

import math
from collections.abc import Callable
from typing import Any

from zoo.arguments import first_line
from zoo.performance.doctor import Finding


def as_finding(subject: str, check: str, passed: bool, says: str, **numbers: Any) -> Finding:
    """A finding that passed or failed; numbers that are not finite are null, for JSON."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in numbers.items()}
    return Finding(subject, check, "passed" if passed else "failed", says, finite)


def attempted(subject: str, check: str, run: Callable[[], Finding]) -> Finding:
    """Run a check; an exception is a failed check."""
    try:
        return run()
    except Exception as error:  # of compilers and drivers, of any type
        return Finding(subject, check, "failed", f"{type(error).__name__}: {first_line(error)}", {})
