"""The verb `scaling` of the command line."""

import sys

from kernels import UserError
from mixers import did_you_mean
from zoo.config.command_line import arguments_of
from zoo.scaling.count import count
from zoo.scaling.fit import fit
from zoo.scaling.plan import plan

HELP = """\
usage: python cli.py scaling plan|fit|count …

  plan   what a budget pays for, and a ladder of runs for it, as a sweep:
         python cli.py scaling plan --mixers=gla,transformer --budget=1e18 --sizes=5 --output=ladder/
  fit    how loss, best size and best number of tokens follow compute, from trained runs:
         python cli.py scaling fit ladder/ [--method=envelope|isoflop|parametric] [--output=law/]
  count  parameters and FLOPs by the conventions of papers, of configs or of every registered mixer:
         python cli.py scaling count gla.yaml transformer.yaml --length=8192

python cli.py scaling PART --help lists the options of each.
"""
PARTS = ["plan", "fit", "count"]


def run_scaling(arguments: list[str]) -> None:
    """Run the part of `scaling` named by the first argument.

    Raises:
        UserError: The name, an option or a value is wrong, or the part cannot do what it is to.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        sys.stdout.write(HELP)
    elif name == "plan":
        plan(**arguments_of(plan, rest, "scaling plan")[1])
    elif name == "fit":
        fit(**arguments_of(fit, rest, "scaling fit", positional="runs")[1])
    elif name == "count":
        count(**arguments_of(count, rest, "scaling count", positional="models")[1])
    else:
        raise UserError(f"scaling: {name!r} is not one of {', '.join(PARTS)}{did_you_mean(name, PARTS)}")
