"""The proofs on a healthy machine, and with ten faults, each of which it has to find."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
import mixers
from kernels import UserError
from kernels.linear_recurrence import chunk
from reproductions.proofs import __main__ as program
from reproductions.proofs import layers, ops, peers
from reproductions.proofs.jobs import Job, jobs
from reproductions.proofs.red_zones import RedZones, inside_red_zones
from reproductions.proofs.workers import Done
from zoo.performance.bench_calls import op_of

CPU = torch.device("cpu")
Run = Callable[[Any], tuple[Tensor, Tensor]]


def subject(name: str, dtype: str = "fp32") -> ops.Subject:
    return next(each for each in ops.subjects(CPU) if each.case.name == name and each.dtype == dtype)


def statuses(each: ops.Subject) -> dict[str, str]:
    return {finding.check: finding.status for finding in ops.prove(each)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gate", ["constant decay", "decay per head", "decay per channel"])
def test_a_recurrence_is_causal_to_the_bit(gate: str, dtype: str):
    actual = ops.causal(subject(f"linear_recurrence ({gate}, 32)", dtype))
    assert (actual.status, actual.says) == ("passed", "exact")
    assert actual.numbers["outputs"] > 10_000


def test_what_is_proved_of_an_op():
    actual = statuses(subject("linear_recurrence (decay per channel, 32)"))
    assert list(actual) == [
        "causal",
        "rows",
        "packed",
        "invariant",
        "pieces",
        "gates",
        "one token",
        "repeats",
        "memory",
    ]
    assert {check: status for check, status in actual.items() if status not in ("passed", "noted")} == {}
    assert list(ops.proofs(subject("linear (few rows, 32)"))) == ["repeats", "memory"]  # it has no axis of tokens
    assert ops.pieces(subject("selective_scan (32)")).status == "passed"  # it has no keys


@pytest.mark.slow
def test_the_command(desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """With two calls of ops and two layers."""
    few = [job for job in jobs(CPU) if job.kind in ("ops", "layers") and job.number in (4, 5)]
    monkeypatch.setattr(program, "jobs", lambda *inputs: few)
    assert program.main(["--device=cpu", "--output=proofs.json"]) == 0
    out, record = capsys.readouterr().out, json.loads(Path("proofs.json").read_text())
    for kind in ("ops", "layers"):
        assert len({each["subject"] for each in record[f"proofs of {kind}"]}) == 2
    progress = "1/4 linear_recurrence (decay per head, 32), torch, fp32: causal exact, rows exact, packed "
    for says in (progress, "op, backend, dtype", "causal: no output depends", "checks passed"):
        assert says in out
    assert record["finished"]


@pytest.mark.nightly
def test_every_op_and_mixer():
    groups = program.proofs("cpu")
    findings = [each for group in groups.values() for each in group]
    assert not program.failures(groups)
    subjects = {each.subject for each in findings}
    assert len(subjects) == len(jobs(CPU))
    assert {name for name in mixers.names() if f"{name}, bf16" in subjects} == {*mixers.names()}
    causal = {each.subject: each.status for each in findings if each.check == "causal"}
    assert set(causal.values()) == {"passed"}
    assert "Bidirectional, fp32" not in causal
    assert {each.check: each.status for each in groups["runs"]}["resumed"] == "passed"


def late_anchor(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """Scores around half the decay of a chunk, which depends on its last token."""
    middle = b[..., -1:, :] / 2
    reach = (b - middle).clamp(-40, 40).to(q)
    return ((q * reach.exp()) @ (k * (-reach).exp()).mT).tril(-1)


def outputs_only(change: Callable[[Any, Tensor], Tensor]) -> Callable[[Run], Run]:
    def fault(run: Run) -> Run:
        def broken(a: Any) -> tuple[Tensor, Tensor]:
            o, state = run(a)
            return change(a, o), state

        return broken

    return fault


def of_next_token(a: Any, o: Tensor) -> Tensor:
    return o + 1e-6 * a.v.roll(-1, 1).expand_as(o)


def of_batch(a: Any, o: Tensor) -> Tensor:
    return o * (1 + 1e-3 * o.shape[0])


def racing(a: Any, o: Tensor) -> Tensor:
    return o * (1 + 1e-6 * torch.rand(()))


def with_gradient(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else x.detach() + factor * (x - x.detach())


def own_decay(a: Any, o: Tensor) -> Tensor:
    """A gradient of decays from every token's own value."""
    return o + 1e-3 * (a.log_decay - a.log_decay.detach()).sum()


def reading_on(a: Any) -> Any:
    """The last value is read from behind the tensor."""
    v = a.v
    further = torch.as_strided(v, v.shape, v.stride(), v.storage_offset() + v.stride(1))
    return replace(a, v=further)


def writing_on(a: Any, o: Tensor) -> Tensor:
    behind = torch.empty_like(o)
    torch.as_strided(behind, (1,), (1,), behind.storage_offset() + behind.numel()).fill_(1.0)
    return o


FAULTS: dict[str, tuple[str, Callable[[Run], Run]]] = {
    "a mask that is off by one": ("causal", outputs_only(of_next_token)),
    "boundaries that are ignored": ("packed", lambda run: lambda a: run(replace(a, cu_seqlens=None))),
    "rows that depend on their number": ("rows", outputs_only(of_batch)),
    "a race": ("repeats", outputs_only(racing)),
    "a state that is not what the tokens leave": ("pieces", lambda run: lambda a: (run(a)[0], run(a)[1] * 1.001)),
    "a gradient that is off by a tenth of a percent": (
        "gates",
        lambda run: lambda a: run(replace(a, v=with_gradient(a.v, 1.001))),
    ),
    "a gradient of decays that is off": (
        "gates",
        lambda run: lambda a: run(replace(a, log_decay=with_gradient(a.log_decay, 1.001))),
    ),
    "a decay of the own token": ("one token", outputs_only(own_decay)),
    "reading behind a tensor": ("memory", lambda run: lambda a: run(reading_on(a))),
    "writing behind a tensor": ("memory", outputs_only(writing_on)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    check, breaks = FAULTS[fault]
    each = subject("linear_recurrence (decay per head, 32)")
    implementations = op_of("linear_recurrence").implementations
    monkeypatch.setitem(implementations, "torch", breaks(implementations["torch"]))
    finding = ops.proofs(each)[check](each)
    assert finding.status == "failed", finding


@pytest.mark.parametrize(("in_both_modes", "status"), [(False, "noted"), (True, "failed")])
def test_sums_in_changing_order_are_noted_where_deterministic_mode_has_one(
    in_both_modes: bool, status: str, monkeypatch: pytest.MonkeyPatch
):
    def rounding_differently(a: Any, o: Tensor) -> Tensor:
        if in_both_modes or not kernels.is_deterministic():
            o.detach()[(0,) * o.dim()] = next(calls) * 2.0**-26 * o.abs().max()
        return o

    calls = itertools.count()
    implementations = op_of("linear_recurrence").implementations
    monkeypatch.setitem(implementations, "torch", outputs_only(rounding_differently)(implementations["torch"]))
    finding = ops.repeated(subject("linear_recurrence (decay per head, 32)"))
    assert finding.status == status, finding


def test_an_anchor_that_looks_ahead_is_found(monkeypatch: pytest.MonkeyPatch):
    each = subject("linear_recurrence (decay per channel, 32)")
    monkeypatch.setattr(chunk.ChannelScores, "apply", late_anchor)
    finding = ops.causal(each)
    assert finding.status == "failed"
    assert finding.numbers["changed"] > 1000
    assert ops.packed(each).status != "failed"


def test_a_mixer_that_looks_ahead_is_found(monkeypatch: pytest.MonkeyPatch):
    layer = layers.built("GLA", "fp32", CPU)
    assert layers.causal(layer).status == "passed"
    forward = type(layer.module).forward

    def ahead(mixer: Any, x: Tensor, *inputs: Any, **options: Any) -> Any:
        y, state = forward(mixer, x, *inputs, **options)
        return y + 1e-6 * x.roll(-1, 1), state

    monkeypatch.setattr(type(layer.module), "forward", ahead)
    assert layers.causal(layer).status == "failed"


def test_red_zones_keep_results():
    x, y = torch.randn(5, 3).T, torch.randn(3, 5)
    with RedZones() as zones:
        inside = zones.surrounded(x)
        assert torch.equal(inside, x)
        assert inside.stride() == x.stride()
        assert torch.equal(torch.empty_like(y).copy_(y), y)
        assert not zones.overwritten()
        base = torch.empty_like(y).requires_grad_() * 1
        base[:, 2] = y[:, 2]  # its gradient is a view of a new tensor
        assert torch.equal(torch.autograd.grad(base.sum(), base, allow_unused=True)[0], torch.ones_like(y))
    written, wrong = inside_red_zones(lambda inputs: {"sum": inputs["x"] + inputs["y"]}, {"x": x, "y": y})
    assert (written, wrong) == (0, [])


@pytest.mark.slow
def test_what_was_found_before_ctrl_c_is_kept(desk: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(device: torch.device, every: list[Job], limit: float):
        yield Done(every[0], [*ops.prove(ops.subject(device, every[0].number))], 1.0)
        assert len(json.loads(Path("proofs.json").read_text())["proofs of ops"]) > 4  # before the next begins
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "proved", stopped)
    with pytest.raises(KeyboardInterrupt):
        program.proofs("cpu", output="proofs.json", only="linear_recurrence (decay per head, 32)")
    record = json.loads(Path("proofs.json").read_text())
    assert (record["finished"], record["passed"]) == (False, False)
    assert {each["check"] for each in record["proofs of ops"]} >= {"causal", "memory"}


def test_chosen_checks(desk: Path):
    groups = program.proofs("cpu", only="GLA, fp32", checks="sampled,processes,invariant")
    assert [each.check for each in groups["layers"]] == ["invariant", "sampled"]
    assert {job.kind for job in jobs(CPU, checks=["processes"])} == {"runs"}
    assert {job.kind for job in jobs(CPU, checks=["gates"])} == {"ops"}
    assert {"rms_norm" in job.name for job in jobs(CPU, checks=["gates"])} == {False}
    assert len({job.kind for job in jobs(CPU, checks=["processes", "invariant"])}) == 3


def test_mistakes(desk: Path):
    with pytest.raises(UserError, match="only: 'GLAA' is not in the name of an op, a layer or a run"):
        program.main(["--device=cpu", "--only=GLAA"])
    with pytest.raises(UserError, match=r"checks: 'smapled' is not one of causal, .*; did you mean 'sampled'"):
        program.main(["--device=cpu", "--checks=smapled"])
    with pytest.raises(UserError, match="checks: processes applies to nothing with 'GLA' in its name"):
        program.main(["--device=cpu", "--only=GLA", "--checks=processes"])
    Path("proofs.json").write_text("{}")
    with pytest.raises(UserError, match=r"output: proofs\.json exists and is not a record of the proofs"):
        program.main(["--device=cpu", "--output=proofs.json"])


@pytest.mark.parity
@pytest.mark.slow
def test_a_peer_is_examined_likewise():
    """A property that a peer lacks is noted, and is no failure."""
    (number,) = [i for i, name in enumerate(peers.names(CPU)) if "mamba2_chunk_scan, fp32" in name]
    findings = {each.check: each for each in peers.prove(CPU, number)}
    assert [*findings] == ["causal", "rows", "pieces", "gates", "one token", "repeats", "memory"]
    assert {each.status for each in findings.values()} <= {"passed", "noted"}
    assert findings["gates"].numbers["error"] < 1e-5  # against the loop here: it computes the same


def test_a_fault_of_a_peer_is_noted(monkeypatch: pytest.MonkeyPatch):
    def leaking(x: Tensor, log_decay: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, None]:
        return x + 1e-6 * x.roll(-1, 1), None

    number = next(i for i, name in enumerate(peers.names(CPU)) if "mamba_selective_scan" in name)
    monkeypatch.setattr(peers.PeerOp, "load", lambda peer: leaking)
    causal = next(each for each in peers.prove(CPU, number) if each.check == "causal")
    assert causal.status == "noted"
    assert "of the outputs change, by" in causal.says
    missing = peers.PEERS[-1]._replace(function="scan_of_another_version")
    monkeypatch.undo()
    monkeypatch.setattr(peers, "PEERS", (missing,))
    (finding,) = peers.prove(CPU, 0)
    assert (finding.check, finding.status) == ("finished", "noted")
    assert "has no attribute 'scan_of_another_version'" in finding.says


@pytest.mark.gpu
def test_proofs_on_a_gpu():
    groups = program.proofs()
    assert not program.failures(groups), program.failures(groups)
    causal = [each for kind in ("ops", "layers") for each in groups[kind] if each.check == "causal"]
    assert {each.status for each in causal} == {"passed"}
