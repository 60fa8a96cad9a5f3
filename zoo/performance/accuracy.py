"""The correctness check of benchmarks: a result must agree with an fp32 reference before its time counts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Gate:
    """Relative root-mean-square errors by name, and their limits."""

    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    def check(self, name: str, actual: Tensor, expected: Tensor, limit: float) -> None:
        """Record the error of a tensor, and its limit."""
        self.errors[name], self.limits[name] = relative_error(actual, expected), limit

    @property
    def passed(self) -> bool:
        """Return whether there is at least one error, and all are within their limits."""
        return bool(self.errors) and all(error <= self.limits[name] for name, error in self.errors.items())

    @property
    def says(self) -> str:
        """The result in words."""
        wrong = [
            f"{name} is off by {error:.1e}, allowed {self.limits[name]:.0e}"
            for name, error in self.errors.items()
            if not error <= self.limits[name]
        ]
        return ", ".join(wrong) if wrong else "passed"

    def record(self) -> dict[str, bool | Mapping[str, float | None]]:
        """The entry for the JSON file; a non-finite error is null."""
        errors = {name: error if math.isfinite(error) else None for name, error in self.errors.items()}
        return {"passed": self.passed, "errors": errors, "limits": self.limits}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; infinite if `actual` has another shape or non-finite values."""
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return math.inf
    x, y = actual.double(), expected.double()
    return float((x - y).norm() / y.norm().clamp(min=1e-30))
