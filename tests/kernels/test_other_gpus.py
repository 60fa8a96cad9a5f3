"""Every launch compiles for GPUs from Ampere to Blackwell, and fits into their shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from .ahead import SHARED_MEMORY


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_launch_compiles_and_fits(architecture: int):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead", str(architecture)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    launches = json.loads(done.stdout)
    assert len(launches) > 100
    limit = SHARED_MEMORY[architecture]
    assert [row for row in launches if "error" in row or row["shared"] > limit] == []
