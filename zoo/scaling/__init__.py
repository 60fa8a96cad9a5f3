"""Scaling laws: runs planned for a budget, laws fitted to runs, and how papers count parameters and FLOPs."""

from collections.abc import Callable
from typing import Any

from kernels import UserError
from mixers import did_you_mean
from zoo.scaling.fit import fit
from zoo.scaling.plan import Plan, plan

HELP = """\
usage: python cli.py scaling plan|fit …

  plan   what a budget pays for, and a ladder of runs for it, as a sweep:
         python cli.py scaling plan --mixers=gla,transformer --budget=1e18 --sizes=5 --output=ladder/
  fit    how loss, best size and best number of tokens follow compute, from trained runs:
         python cli.py scaling fit ladder/ [--method=envelope|isoflop|parametric] [--output=law/]

python cli.py scaling PART --help lists the options of each.
"""


def part(name: str) -> tuple[Callable[..., Any], str | None]:
    """A function of the verb `scaling`, and which of its parameters takes plain arguments.

    Raises:
        UserError: There is no such part.
    """
    parts: dict[str, tuple[Callable[..., Any], str | None]] = {"plan": (plan, None), "fit": (fit, "runs")}
    if name not in parts:
        raise UserError(f"scaling: {name!r} is not one of {', '.join(parts)}{did_you_mean(name, list(parts))}")
    return parts[name]


__all__ = ["HELP", "Plan", "fit", "part", "plan"]
