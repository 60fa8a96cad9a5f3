"""The verb `scaling` of the command line."""

import sys
from collections.abc import Callable
from typing import Any

from zoo.arguments import check_names
from zoo.config.command_line import arguments_of
from zoo.scaling.fit import fit
from zoo.scaling.plan import plan

HELP = """\
usage: python cli.py scaling plan|fit …

  plan  what a budget pays for, and a ladder of runs for it, as a sweep:
        python cli.py scaling plan --mixers=gla,transformer --budget=1e18 --sizes=5 --output=ladder/
  fit   how loss, best size and best number of tokens follow compute, from trained runs:
        python cli.py scaling fit ladder/ [--method=envelope|isoflop|parametric] [--output=law/]

python cli.py scaling PART --help lists the options of each.
"""
# part → its function, and the option that plain arguments set
PARTS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "plan": (plan, None),
    "fit": (fit, "runs"),
}


def run_scaling(arguments: list[str]) -> None:
    """Run the part of `scaling` named by the first argument.

    Raises:
        UserError: The name, an option or a value is wrong, or the part cannot do what it is to.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        sys.stdout.write(HELP)
        return
    check_names("scaling", [name], PARTS)
    function, positional = PARTS[name]
    function(**arguments_of(function, rest, f"scaling {name}", positional=positional)[1])
