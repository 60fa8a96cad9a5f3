"""Proofs under compute-sanitizer, of which a script takes the place here."""

from pathlib import Path

import pytest

from reproductions.proofs import sanitizer

REPORT = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at add_rows+0x100
========= ERROR SUMMARY: 2 errors
========= ERROR SUMMARY: 0 errors
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which prints a report and its arguments."""
    monkeypatch.setattr(sanitizer, "pick_device", lambda name: name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    (tmp_path / "report").write_text(REPORT)
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/report\n')
    program.chmod(0o755)
    return tmp_path


def test_errors_are_counted(installed: Path):
    finding = sanitizer.watched("memcheck", "delta_rule (decay per head, 128)")
    assert finding.status == "failed"
    assert finding.says == "2 errors, such as: Invalid __global__ write of size 4 bytes"
    arguments = (installed / "arguments").read_text()
    assert arguments.startswith("--tool memcheck --target-processes all ")
    assert "-m reproductions.proofs --device=cuda" in arguments
    assert "--only=delta_rule (decay per head, 128)" in arguments


@pytest.mark.parametrize(
    ("report", "status", "says"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", "passed", "exact"),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "passed", "exact"),
        ("error: only: 'x' is not in the name\n", "failed", "exit code 0: error: only: 'x' is not in the name"),
    ],
)
def test_what_it_prints(installed: Path, report: str, status: str, says: str):
    (installed / "report").write_text(report)
    finding = sanitizer.watched("racecheck", "x")
    assert (finding.status, finding.says) == (status, says)
