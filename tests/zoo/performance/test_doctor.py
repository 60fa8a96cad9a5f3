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
import zoo
from kernels import UserError
from mixers.counting import counted_flops
from zoo.performance import doctor as examination
from zoo.performance.doctor import Finding, examine, gpu, packages
from zoo.performance.op_calls import cases, ops


def module(op: str) -> Any:
    return sys.modules[getattr(kernels, op).__module__]


def plant(patch: pytest.MonkeyPatch, op: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the implementation of an op that runs here by a faulty one."""
    implementations = module(op).OP.implementations
    patch.setitem(implementations, "torch", fault(implementations["torch"]))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine only the ops in which faults are planted here: the others take most of the time."""
    few = {"delta_rule", "gated_linear"}
    monkeypatch.setattr(examination, "cases", lambda size: [case for case in cases(size) if case.op in few])


@pytest.mark.slow
def test_a_healthy_machine(command, desk: Path):
    done = command("doctor", "--output", "doctor.json")
    assert done.code == 0, done.out
    record = json.loads(Path("doctor.json").read_text())
    assert record["passed"]
    assert record["seconds"] < 30
    subjects = {finding["subject"] for finding in record["ops"]}
    assert {finding["check"] for finding in record["ops"]} == {"error"}
    assert len({subject.partition(" ")[0] for subject in subjects}) == len(ops())
    assert {finding["subject"] for finding in record["machine"]} >= {"packages", "GPU", "memory", "disk"}
    for word in (*subjects, "checks passed", "; written to doctor.json"):
        assert word in done.out


def test_every_op_is_known():
    """An op that is new has to have a case."""
    assert {case.op for case in cases(32)} == {*ops()}
    assert {"delta_rule", "linear_recurrence", "window_attention", "linear_cross_entropy"} <= {*ops()}


@pytest.mark.parametrize("op", ops())
def test_flops_of_ops_are_counted_without_their_memory(op: str):
    """So those of a plug-in that calls them need no `flops` of its own."""
    for case in cases(16):
        if case.op == op:
            on_meta = case.on(torch.device("meta"), torch.float32)
            shapes: list[dict[str, torch.Size]] = []
            counted_flops(lambda on_meta=on_meta, shapes=shapes: shapes.append(sizes(on_meta.outputs())))
            assert shapes == [sizes(case.outputs())]


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in tensors.items()}


@pytest.mark.slow
def test_a_gradient_that_is_off_by_one_percent(command, few_cases: None, monkeypatch: pytest.MonkeyPatch):
    def fault(run):
        def wrong(a):
            return run(replace(a, v=a.v.detach() + 1.01 * (a.v - a.v.detach())))

        return wrong

    plant(monkeypatch, "delta_rule", fault)
    done = command("doctor")
    assert done.code == 1
    said = "failed delta_rule (no decay, 32), error: torch: the gradient of v is off by 1.0e-02, allowed 2e-05"
    assert said in done.out
    named = [line for line in done.out.splitlines() if line.startswith("failed ")]
    assert all("delta_rule" in line for line in named)
    assert f"{len(named)} of " in done.out


@pytest.mark.slow
def test_a_crash_is_a_finding(few_cases: None, monkeypatch: pytest.MonkeyPatch):
    def fault(run):
        def broken(*inputs):
            raise RuntimeError("no kernel image is available for execution on the device\nand more")

        return broken

    plant(monkeypatch, "gated_linear", fault)
    failures = zoo.doctor("cpu", verbose=False).failures
    assert {each.subject for each in failures} == {"gated_linear (32)", "gated_linear (whole MLP, 32)"}
    assert failures[0].says == "RuntimeError: no kernel image is available for execution on the device"


def dies(number: int, device: torch.device) -> Finding:
    if number == 1:
        os._exit(3)
    return Finding(str(number), "error", "passed", "", {})


@pytest.mark.slow
def test_a_process_that_dies_fails_its_op_alone(few_cases: None, monkeypatch: pytest.MonkeyPatch):
    """On a GPU; here in processes that are forked."""
    monkeypatch.setattr(examination, "get_context", lambda method: multiprocessing.get_context("fork"))
    monkeypatch.setattr(examination, "_checked", dies)
    monkeypatch.setattr(examination, "LIMIT_S", 3.0)
    findings = examine(torch.device("cuda"))
    failed = [each for each in findings if each.status == "failed"]
    calls = examination.cases(64)
    assert [each.subject for each in failed] == [calls[1].name]
    assert failed[0].says == "RuntimeError: did not finish in 3 s, or its process died"
    assert len([each for each in findings if each.status == "passed"]) == len(calls) - 1


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
def test_a_full_disk(few_cases: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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
        (["--outptu=a.json"], "did you mean 'output'"),
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
    assert not actual.failed, actual.failures
    assert actual.seconds < 30
