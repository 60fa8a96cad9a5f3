"""Idle threads leave their cores to other programs."""

import os
import subprocess
import sys

import pytest
import torch

from kernels.openmp import SETTINGS, shorten_waiting


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "7"}])
def test_what_the_user_has_set_stays(chosen: dict[str, str]):
    environment = dict(chosen)
    shorten_waiting(environment)
    assert environment == chosen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's wheels have libgomp on Linux only")
def test_openmp_has_read_it():
    """It is set before torch is imported; OpenMP itself says what it has read."""
    environment = {name: value for name, value in os.environ.items() if name not in {"OMP_WAIT_POLICY", *SETTINGS}}
    child = subprocess.run(
        [sys.executable, "-c", "import kernels"],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '2000'" in child.stderr, torch.__config__.parallel_info()
