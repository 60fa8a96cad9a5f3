"""The list of `dev/broken_kernels.py` fits the code, and names calls that the proofs make."""

import ast

import pytest
import torch

from dev.broken_kernels import Fault, faults
from reproductions.proofs.ops import _of_other_kernels


def test_every_fault_applies():
    listed = faults()
    for fault in listed:
        ast.parse(fault.applied(), str(fault))
    assert sum("a race" in fault.why for fault in listed) >= 3
    with pytest.raises(ValueError, match=r"`before` occurs 0 times in cli\.py: a test"):
        Fault("a test", "cli.py", "nowhere in this file", "", "").applied()


def test_every_fault_names_a_call():
    names = {case.name.replace(" many heads,", "") for case in _of_other_kernels(torch.device("cpu"))}
    names |= {"rms_norm (128)"}
    for fault in faults():
        call, backend, _ = fault.only.rsplit(", ", 2)
        assert call.replace(" many heads,", "") in names
        assert backend == "triton"
