"""The doctor on a healthy machine, and on one with a fault planted in it, which it has to name."""

import importlib.metadata
import json
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
import mixers
import zoo
from kernels import UserError
from reproductions.proofs.op_calls import ops
from zoo.performance import doctor as examination
from zoo.performance.bench_calls import op_of
from zoo.performance.doctor import Finding, examine, gpu, packages


def module(op: str) -> Any:
    return sys.modules[getattr(kernels, op).__module__]


def plant(patch: pytest.MonkeyPatch, op: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the implementation of an op that runs here by a faulty one."""
    implementations = module(op).OP.implementations
    patch.setitem(implementations, "torch", fault(implementations["torch"]))


@pytest.fixture
def few_mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine only a few mixers, of which some call the ops in which faults are planted here."""
    monkeypatch.setattr(examination, "subjects", lambda: ["GatedDeltaNet", "HGRN1", "SoftmaxAttention"])


@pytest.mark.slow
def test_a_healthy_machine(command, desk: Path):
    done = command("doctor", "--output", "doctor.json")
    assert done.code == 0, done.out
    record = json.loads(Path("doctor.json").read_text())
    assert record["passed"]
    assert record["seconds"] < 30
    subjects = {finding["subject"] for finding in record["mixers"]}
    assert {finding["check"] for finding in record["mixers"]} == {"error"}
    assert subjects == {*mixers.names()} - {"Bidirectional"}
    called = {op for finding in record["mixers"] for op in finding["numbers"]["ops"]}
    assert {op_of(name).name for name in ops()} - called == {"linear_kl", "precondition"}  # distillation, an option
    assert {finding["subject"] for finding in record["machine"]} >= {"packages", "GPU", "memory", "disk"}
    for word in (*subjects, "checks passed", "; written to doctor.json"):
        assert word in done.out


@pytest.mark.slow
def test_a_gradient_that_is_off_by_one_percent(command, few_mixers: None, monkeypatch: pytest.MonkeyPatch):
    def fault(run):
        def wrong(a):
            return run(replace(a, v=a.v.detach() + 1.01 * (a.v - a.v.detach())))

        return wrong

    plant(monkeypatch, "delta_rule", fault)
    done = command("doctor")
    assert done.code == 1
    named = [line for line in done.out.splitlines() if line.startswith("failed ")]
    assert re.fullmatch(r"failed GatedDeltaNet, error: torch: gradients is off by .*, allowed 1e-04", named[0])
    assert f"{len(named)} of " in done.out
    assert len(named) == 1
    suspects = next(
        line for line in done.out.splitlines() if line.startswith("called by mixers that failed, and by none")
    )
    assert "delta_rule" in suspects
    assert "window_attention" not in suspects


@pytest.mark.slow
def test_a_crash_is_a_finding(few_mixers: None, monkeypatch: pytest.MonkeyPatch):
    def fault(run):
        def broken(*inputs):
            raise RuntimeError("no kernel image is available for execution on the device\nand more")

        return broken

    plant(monkeypatch, "window_attention", fault)
    failures = zoo.doctor("cpu", verbose=False).failures
    assert [each.subject for each in failures] == ["SoftmaxAttention"]
    assert failures[0].says == "RuntimeError: no kernel image is available for execution on the device"


def dies(name: str, device: torch.device) -> Finding:
    if name == "HGRN1":
        os._exit(3)
    return Finding(name, "error", "passed", "", {})


@pytest.mark.slow
def test_a_process_that_dies_fails_its_mixer_alone(few_mixers: None, monkeypatch: pytest.MonkeyPatch):
    """On a GPU; here in processes that are forked."""
    monkeypatch.setattr(examination, "get_context", lambda method: multiprocessing.get_context("fork"))
    monkeypatch.setattr(examination, "_checked", dies)
    monkeypatch.setattr(examination, "LIMIT_S", 3.0)
    findings = examine(torch.device("cuda"))
    failed = [each for each in findings if each.status == "failed"]
    assert [each.subject for each in failed] == ["HGRN1"]
    assert failed[0].says == "did not finish in 3 s, or its process died"
    assert [each.status for each in findings] == ["passed", "failed", "passed"]


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ("3.6.0", r"Triton 3\.6\.0, whose known faults no launch here uses: .*FLA #640.*triton #11366"),
        ("3.3.1", "3.3.1$"),
    ],
)
def test_what_the_compiler_is_known_for(installed: str, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(examination, "version", lambda name: installed)
    about = SimpleNamespace(name="a GPU", total_memory=1 << 36, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    finding = gpu(torch.device("cuda"))
    assert (finding.subject, finding.status) == ("GPU", "passed")
    assert re.search(says, finding.says)


def test_packages_of_other_versions(monkeypatch: pytest.MonkeyPatch):
    installed = {"torch": "2.1.0+cpu", "rich": "99.0"}
    installed_version = importlib.metadata.version
    monkeypatch.setattr(examination, "version", lambda name: installed.get(name) or installed_version(name))
    finding = packages()
    assert finding.status == "failed"
    assert "torch 2.1.0 is installed, and >=2.11 is needed" in finding.says
    del installed["torch"]
    finding = packages()
    assert finding.status == "noted"
    assert "rich 99.0 (tested with " in finding.says


@pytest.mark.slow
def test_a_full_disk(few_mixers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**29))
    failures = zoo.doctor("cpu", verbose=False).failures
    assert {each.subject for each in failures} == {"disk"}
    assert failures[0].says == "0.5 GiB is less than 1 GiB"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device=gpu"], "device: 'gpu' is not one of cpu, cuda"),
        (["--output=."], "output: . is a folder; name a file, such as doctor.json"),
        (["--output=thesis.md"], "output: thesis.md exists and is not a record of the doctor"),
        (["--output=thesis.json"], "output: thesis.json exists and is not a record of the doctor"),
    ],
)
def test_mistakes(command, arguments: list[str], expected: str, desk: Path):
    (desk / "thesis.md").write_text("years of work")
    (desk / "thesis.json").write_text('{"work": "years"}')
    done = command("doctor", *arguments).refused()
    assert expected in done.err
    assert "Traceback" not in done.err
    with pytest.raises(UserError, match="device: 'tpu'"):
        zoo.doctor("tpu")


@pytest.mark.gpu
def test_half_a_minute_on_a_new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    actual = zoo.doctor(verbose=False)
    assert not actual.failures
    assert actual.seconds < 30
