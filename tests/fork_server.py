"""The client of `nursery.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .commands import ROOT


class Nursery:
    """Starts command lines quickly (see `nursery.py`)."""

    def __init__(self, folder: Path) -> None:
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                **one,
                "PYTHONPATH": str(ROOT),
                "ZOO_RUN": "",
                "ZOO_PARENT": "",
                "DS_ACCELERATOR": "cpu",
            },
        )

    def ask(self, **order: object) -> Any:
        """The answer to an order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
