"""Every launch compiles for GPUs from Ampere to Blackwell, and fits into their shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from .ahead import SHARED_MEMORY

# kernels that start before the one in front of them has finished; all of them wait before they touch memory
OVERLAPPING = {
    "kernels.delta_rule.gpu.step.advance",
    "kernels.delta_rule.gpu.token.advance_token",
    "kernels.features.gpu.token.tokens",
    "kernels.linear.gpu.op.linear_rows",
    "kernels.linear.gpu.op.linear_tile",
    "kernels.norm.gpu.kernels.forward",
}


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
    overlapping = [row for row in launches if "overlaps" in row]
    assert {row["kernel"] for row in overlapping} == (OVERLAPPING if architecture == 90 else set())
    assert [row for row in overlapping if row["overlaps"] != 1 or row["touched"]] == []
