"""How to start the command line in a process of its own."""

import sys
from pathlib import Path

# beside the package, in a checkout and in a wheel
COMMAND = (sys.executable, str(Path(__file__).parents[2] / "cli.py"))
