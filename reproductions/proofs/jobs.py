"""What is to be proved on a device, and the processes that do it."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

import torch

from kernels import UserError
from reproductions.proofs import layers, ops, peers, runs
from reproductions.proofs.workers import Done, side_by_side
from zoo.arguments import check_names
from zoo.performance.doctor import Finding, Status

EXPLAINED = """\
exact: the same bits; a number: the relative difference
causal: no output depends on later tokens
rows: a row of a batch has the results that it has alone
packed: a packed document has the results that it has alone
invariant: in deterministic mode, rows, packed documents and pieces of whole chunks have the results of one alone
sampled: in deterministic mode, sampled tokens have the log-probabilities that training computes for them
pieces: a sequence in pieces, or decoded, has the results of one call
gates: decays from none to resets, against fp64: results / the decays' gradient
one token: documents of one token give decays no gradient
repeats: each call has the same results
memory: nothing outside of the tensors is read or written
finished: only of what was stopped or crashed
resumed: a continued run has the losses of one that was not stopped
2 processes: sequences that two processes share have the losses of one
processes: in deterministic mode, two processes that share rows or sequences have the losses and weights of one
"""
ORDER = [line.partition(":")[0] for line in EXPLAINED.splitlines()[1:]]
CHECKS = tuple(check for check in ORDER if check != "finished")
TITLES = {"ops": "op, backend, dtype", "peers": "op of another library", "layers": "mixer or model", "runs": "run"}
MOST = 16  # processes; each needs half a GiB of the GPU's memory
LONGEST_FIRST = ("runs", "peers", "layers", "ops")


class Job(NamedTuple):
    """Something to prove."""

    kind: str  # ops | layers | peers | runs
    number: int  # among those of its kind
    name: str
    checks: tuple[str, ...] = CHECKS  # those to make, as far as they apply


def jobs(
    device: torch.device, with_peers: bool = False, only: str | None = None, checks: Sequence[str] = CHECKS
) -> list[Job]:
    """Everything to prove on a device, or the part of it whose names contain a text and that has one of the properties.

    Raises:
        UserError: There are to be peers, and none runs here; no name contains the text; or a check does not exist, or
            applies to nothing that is chosen.
    """
    check_names("checks", checks or [""], CHECKS)
    names: dict[str, list[tuple[str, Collection[str]]]] = {  # with the properties
        "ops": [(subject.name, ops.proofs(subject)) for subject in ops.subjects(device)],
        "layers": [(", ".join(layer), layers.PROOFS) for layer in layers.layers(device)],
    }
    if with_peers:
        names["peers"] = [(name, CHECKS) for name in peers.names(device)]
        if not names["peers"]:
            raise UserError(
                "peers: neither transformers nor, on a GPU, flash-linear-attention is installed; leave --peers out"
            )
    names["runs"] = [(runs.NAME, runs.PROOFS)]
    every = [
        (Job(kind, number, name, tuple(checks)), properties)
        for kind, group in names.items()
        for number, (name, properties) in enumerate(group)
    ]
    named = [each for each in every if only is None or only in each[0].name]
    if not named:
        raise UserError(f"only: {only!r} is not in the name of an op, a layer or a run, such as {every[0][0].name!r}")
    chosen = [job for job, properties in named if any(check in properties for check in checks)]
    if not chosen:
        raise UserError(f"checks: {', '.join(checks)} applies to nothing with {only!r} in its name")
    return chosen


def prove(job: Job, device: torch.device) -> Iterator[Finding]:
    """The findings of one job."""
    if job.kind == "layers":
        yield from layers.prove(*[*layers.layers(device)][job.number], device, job.checks)
    elif job.kind == "runs":
        yield from runs.prove(job.checks)
    elif job.kind == "peers":
        yield from peers.prove(device, job.number, job.checks)
    else:
        yield from ops.prove(ops.subject(device, job.number), job.checks)
    if device.type == "cuda":
        torch.cuda.synchronize()  # raises what a kernel left behind: the next job needs a new process


def proved(device: torch.device, every: Sequence[Job], limit: float) -> Iterator[Done[Job, Finding]]:
    """Do all jobs, on a GPU several at a time, and yield each when it has ended, with what was found."""
    if device.type == "cuda":
        ordered = sorted(every, key=lambda job: LONGEST_FIRST.index(job.kind))
        for done in side_by_side(partial(prove, device=device), ordered, max(1, min(MOST, os.cpu_count() or 1)), limit):
            if done.problem is not None:
                status: Status = "noted" if done.job.kind == "peers" else "failed"
                done.results.append(Finding(done.job.name, "finished", status, done.problem, {}))
            yield done
        return
    for job in every:
        start = monotonic()
        yield Done(job, [*prove(job, device)], monotonic() - start)


def by_kind(every: Sequence[Job], by_job: Mapping[Job, list[Finding]]) -> dict[str, list[Finding]]:
    """All findings by the kind of their job, in the order of the jobs."""
    groups: dict[str, list[Finding]] = {}
    for job in every:
        groups.setdefault(job.kind, []).extend(by_job.get(job, []))
    return groups
