"""The command that starts the command line in a separate process."""

import sys
from pathlib import Path

# cli.py is next to the package, in a checkout and in a wheel
COMMAND = (sys.executable, str(Path(__file__).parents[2] / "cli.py"))
