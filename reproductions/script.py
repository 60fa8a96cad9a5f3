"""The command line of a script: its options are the arguments of a function."""

import sys
from collections.abc import Callable

from kernels import UserError
from zoo.config.command_line import arguments_of


def run(function: Callable[..., object]) -> None:
    """Call a function with the options of this process; one sentence is printed for a user's mistake, or for Ctrl-C."""
    try:
        function(**arguments_of(function, sys.argv[1:], function.__name__)[1])
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
    except OSError as error:  # of a file that cannot be read or written
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; complete rows are in the file")
