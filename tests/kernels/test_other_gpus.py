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
    "kernels.activation_gate.gpu.op.multiply",
    "kernels.bonus_readout.gpu.op.read",
    "kernels.delta_rule.gpu.general.step.advance",
    "kernels.delta_rule.gpu.step.advance",
    "kernels.erase_gates.gpu.op.erase_gates_forward",
    "kernels.features.gpu.kernels.forward",
    "kernels.features.gpu.token.tokens",
    "kernels.forget_gate.gpu.low_rank.low_rank_forward",
    "kernels.forget_gate.gpu.op.forget_forward",
    "kernels.linear.gpu.op.linear_rows",
    "kernels.linear.gpu.op.linear_several",
    "kernels.linear.gpu.op.linear_tile",
    "kernels.linear_recurrence.gpu.step.advance",
    "kernels.norm.gpu.kernels.forward",
    "kernels.recurrence_token.gpu.op.advance_token",
    "kernels.selective_scan.gpu.chunks.walk",
    "kernels.skip_readout.gpu.op.read",
    "kernels.token_shift.gpu.op.mix",
    "kernels.trapezoid_token.gpu.op.advance_token",
    "kernels.value_decay_recurrence.gpu.op.advance",
    "kernels.window_attention.gpu.token.add_newest",
    "kernels.window_attention.gpu.token.attend_to_part",
}

PARSED = """
import importlib, pkgutil, kernels
from triton.runtime.jit import JITFunction

for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
    for name, function in vars(importlib.import_module(module.name)).items():
        if isinstance(function, JITFunction):
            try:
                function.cache_key
            except Exception as error:
                print(module.name, name, repr(error))
"""


def test_triton_reads_every_kernel():
    """The interpreter runs Python that Triton's own parser refuses, such as nested targets of an assignment."""
    done = subprocess.run([sys.executable, "-c", PARSED], capture_output=True, text=True, env=without_interpreter())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_launch_compiles_and_fits(architecture: int):
    command = [sys.executable, "-m", "tests.kernels.ahead", str(architecture)]
    done = subprocess.run(command, capture_output=True, text=True, env=without_interpreter())
    assert done.returncode == 0, done.stderr
    launches = json.loads(done.stdout)
    assert len(launches) > 100
    limit = SHARED_MEMORY[architecture]
    assert [row for row in launches if "error" in row or row["shared"] > limit] == []
    overlapping = [row for row in launches if "overlaps" in row]
    assert {row["kernel"] for row in overlapping} == (OVERLAPPING if architecture == 90 else set())
    for row in overlapping:
        assert row["overlaps"] == 1
        assert set(row["touched"]) == ({"ld.global"} if row["early"] else set()), row  # read-only weights
    assert any(row["early"] for row in overlapping) is (architecture == 90)
