"""The doctor on a healthy machine, and on one with a fault planted in it, which it has to name."""

import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
import mixers
import zoo
from kernels import UserError
from kernels.core.deterministic import is_deterministic
from kernels.gpu.launch_table import TABLE, LaunchConfig
from mixers.counting import counted_flops
from zoo.performance.doctor import checks, workers
from zoo.performance.doctor.checks import Finding, examine, examined, known_cases, repeats
from zoo.performance.doctor.machine import compiler, packages
from zoo.performance.op_calls import cases, ops

pytest_plugins = "tests.desk"


def module(op: str) -> Any:
    return sys.modules[getattr(kernels, op).__module__]


def plant(patch: pytest.MonkeyPatch, op: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the implementation of an op that runs here by a faulty one."""
    implementations = module(op).OP.implementations
    patch.setitem(implementations, "torch", fault(implementations["torch"]))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine only the ops in which faults are planted here: the others take most of the time."""
    few = {"delta_rule", "discretise", "gated_linear", "linear_recurrence"}
    monkeypatch.setattr(checks, "known_cases", lambda device: [c for c in known_cases(device) if c.op in few])


@pytest.mark.slow
def test_a_healthy_machine(command, desk: Path):
    done = command("doctor", "--output", "doctor.json")
    assert done.code == 0, done.out
    record = json.loads(Path("doctor.json").read_text())
    assert record["passed"]
    assert record["seconds"] < 120
    subjects = {finding["subject"] for finding in record["ops"]}
    checks = {finding["check"] for finding in record["ops"]}
    assert checks == {"path", "fp32", "bf16", "packed", "repeats"}
    assert len({subject.partition(" ")[0] for subject in subjects}) == len(ops())
    assert {finding["subject"] for finding in record["mixers"]} == {*mixers.names()}
    assert {finding["subject"] for finding in record["machine"]} >= {"packages", "GPU", "memory", "disk"}
    for word in (*subjects, *mixers.names(), "checks passed", "; written to doctor.json"):
        assert word in done.out
    explained = done.out[done.out.index("path: the implementation") :].splitlines()
    assert all(len(line) < 80 for line in explained)  # no line is torn by a narrow terminal


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
def test_a_gradient_that_is_off_by_one_percent(command, monkeypatch: pytest.MonkeyPatch):
    def fault(run):
        def wrong(a):
            return run(replace(a, v=a.v.detach() + 1.01 * (a.v - a.v.detach())))

        return wrong

    plant(monkeypatch, "delta_rule", fault)
    done = command("doctor")
    assert done.code == 1
    assert "failed delta_rule (no decay, 32), fp32: the gradient of v is off by 1.0e-02, allowed 2e-05" in done.out
    named = [line for line in done.out.splitlines() if line.startswith("failed ")]
    assert all("delta_rule" in line for line in named)
    assert f"{len(named)} of " in done.out


@pytest.mark.slow
def test_documents_that_see_their_neighbours(few_cases: None, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, "linear_recurrence", lambda run: lambda a: run(replace(a, cu_seqlens=None)))
    failures = zoo.doctor("cpu", verbose=False).failures
    assert {each.check for each in failures} == {"packed"}
    subjects = {each.subject for each in failures}
    assert {"linear_recurrence (decay per head, 32)", "GLA", "Mamba2"} <= subjects
    assert not {"GatedDeltaNet", "SoftmaxAttention"} & subjects
    said = next(str(each) for each in failures if each.subject.startswith("linear_recurrence"))
    assert "outputs change by" in said
    assert "of a gradient goes to the neighbours" in said


@pytest.mark.slow
def test_results_that_change_from_call_to_call(few_cases: None, monkeypatch: pytest.MonkeyPatch):
    def fault(run):
        def noisy(*inputs: Tensor):
            log_decay, dt = run(*inputs)
            return log_decay, dt * (1 + 1e-6 * torch.rand(()))

        return noisy

    plant(monkeypatch, "discretise", fault)
    (failure,) = zoo.doctor("cpu", verbose=False).failures
    assert (failure.subject, failure.check) == ("discretise (32)", "repeats")
    assert "output 2" in failure.says


class Noise(torch.autograd.Function):
    """x with noise in the output or in the gradient, in deterministic mode only if `always`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str, always: bool) -> Tensor:
        ctx.noisy = (always or not is_deterministic()) and where == "gradient"
        return (
            x * (1 + 1e-6 * torch.rand(())) if where == "output" and (always or not is_deterministic()) else x.clone()
        )

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx * (1 + 1e-6 * torch.rand(())) if ctx.noisy else dx, None, None


@pytest.mark.parametrize(
    ("where", "always", "status"),
    [("gradient", False, "noted"), ("gradient", True, "failed"), ("output", False, "failed")],
)
def test_gradients_of_a_library_may_change(where: str, always: bool, status: str, monkeypatch: pytest.MonkeyPatch):
    """They do in FlexAttention, unless PyTorch is deterministic."""
    plant(monkeypatch, "window_attention", lambda run: lambda a: run(replace(a, q=Noise.apply(a.q, where, always))))
    case = next(case for case in cases(32) if case.op == "window_attention")
    finding = repeats(case, torch.device("cpu"))
    assert finding.status == status
    assert ("but not in deterministic mode" in finding.says) == (status == "noted")


def test_a_long_note_is_below_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A long note in a cell would squeeze the other columns."""
    name, note = (
        "window_attention (32)",
        "the gradient of q changed from one call to the next, but not in deterministic mode",
    )
    ops = [Finding(name, "path", "noted", "torch", {}), Finding(name, "repeats", "noted", note, {})]
    layers = [Finding("GLA", "bf16", "passed", "4e-03", {})]
    monkeypatch.setattr(sys.modules[zoo.doctor.__module__], "examine", lambda place, say: (ops, layers))
    zoo.doctor("cpu")
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith(f"  {name}"))
    assert row[-2:] == ["torch", "noted"]
    assert f"noted {name}, repeats: {note}" in lines


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


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ("3.6.0", r"^3\.6\.0: known on Hopper are \d+: .*FLA #640.*triton #11366.*\. No launch here uses them$"),
        ("3.3.1", r"^3\.3\.1: none is known$"),
    ],
)
def test_what_the_compiler_is_known_for(installed: str, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[packages.__module__], "version", lambda name: installed)
    finding = compiler()
    assert (finding.subject, finding.status) == ("Triton", "passed")
    assert re.search(says, finding.says)


def test_a_launch_that_is_compiled_wrongly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TABLE["delta_rule.dq"], (9, 64, 2), LaunchConfig(4, 2, keys=32, values=64))
    finding = compiler()
    assert finding.status == "failed"
    assert "delta_rule.dq 64" in finding.says


def test_packages_of_other_versions(monkeypatch: pytest.MonkeyPatch):
    installed = {"torch": "2.1.0+cpu", "rich": "99.0"}
    installed_version = importlib.metadata.version
    monkeypatch.setattr(
        sys.modules[packages.__module__], "version", lambda name: installed.get(name) or installed_version(name)
    )
    finding = packages()
    assert finding.status == "failed"
    assert "torch 2.1.0+cpu is installed, and >=2.11 is needed" in finding.says
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
    done = command("doctor", *arguments)
    assert done.code == 2
    assert expected in done.err
    assert "Traceback" not in done.err
    with pytest.raises(UserError, match="device: 'tpu'"):
        zoo.doctor("tpu")


@pytest.mark.nightly
def test_ops_and_mixers_are_examined_side_by_side():
    cpu = torch.device("cpu")
    subjects = [*range(len(known_cases(cpu))), *mixers.names()]
    done = [*workers.side_by_side(partial(examined, cpu), subjects, 2, 300)]
    assert {each.job for each in done} == {*subjects}
    assert all(each.problem is None and each.results for each in done)


def test_findings_of_several_processes_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """In the order of the table, however they arrive; a process that dies is a failure."""

    def reversed_and_dying(work, subjects, processes, limit):
        for subject in reversed(subjects):
            problem = "the process ended with exit code -11" if subject == "GLA" else None
            yield workers.Done(subject, [Finding(str(subject), "fp32", "passed", "", {})], 1.0, problem)

    monkeypatch.setattr(checks, "side_by_side", reversed_and_dying)
    gpu, seen = torch.device("cuda"), list[str]()
    of_ops, of_mixers = examine(gpu, seen.append)
    number = len(known_cases(gpu))
    assert [each.subject for each in of_ops] == [str(i) for i in range(number)]
    assert [each.subject for each in of_mixers if each.check == "fp32"] == mixers.names()
    assert [each for each in of_mixers if each.status == "failed"] == [
        Finding("GLA", "process", "failed", "the process ended with exit code -11", {})
    ]
    assert seen[-1] == f"examined {number + len(mixers.names())} of {number + len(mixers.names())}"


@pytest.mark.gpu
def test_two_minutes_on_a_new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    actual = zoo.doctor(verbose=False)
    assert not actual.failed, actual.failures
    assert actual.seconds < 120
