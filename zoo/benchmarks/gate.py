"""Right first: what a benchmark times must agree with slow fp32 before its time counts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Gate:
    """Relative root-mean-square errors, by name, and how large each may be."""

    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    def check(self, name: str, found: Tensor, wanted: Tensor, limit: float) -> None:
        """Compare one tensor."""
        self.errors[name], self.limits[name] = relative_error(found, wanted), limit

    @property
    def passed(self) -> bool:
        """Whether something was compared and every error is within its limit."""
        return bool(self.errors) and all(error <= self.limits[name] for name, error in self.errors.items())

    @property
    def says(self) -> str:
        """The outcome in words."""
        wrong = [
            f"{name} is off by {error:.1e}, allowed {self.limits[name]:.0e}"
            for name, error in self.errors.items()
            if not error <= self.limits[name]
        ]
        return ", ".join(wrong) if wrong else "passed"

    def record(self) -> dict[str, bool | Mapping[str, float | None]]:
        """For the JSON file; an error that is no number is null."""
        errors = {name: error if math.isfinite(error) else None for name, error in self.errors.items()}
        return {"passed": self.passed, "errors": errors, "limits": self.limits}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; infinite where `found` has another shape or holds no numbers."""
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    x, y = found.double(), wanted.double()
    return float((x - y).norm() / y.norm().clamp(min=1e-30))
