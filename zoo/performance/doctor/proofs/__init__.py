"""`doctor --proofs`: which properties hold on this machine to the bit, and how nearly the others do."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels import UserError
from zoo.performance.doctor.checks import Finding
from zoo.performance.doctor.proofs import layers, ops, peers, runs

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
resumed: a continued run has the losses of one that was not stopped
2 processes: sequences that two processes share have the losses of one
"""
ORDER = [line.partition(":")[0] for line in EXPLAINED.splitlines()[1:]]
TITLES = {"ops": "op, backend, dtype", "peers": "op of another library", "layers": "mixer or model", "runs": "run"}


class Job(NamedTuple):
    """Something to prove: an op's call by its number, or a layer by its name and dtype."""

    kind: str  # ops | layers | peers | runs
    number: int


def jobs(device: torch.device, with_peers: bool) -> list[Job]:
    """Everything to prove on a device.

    Raises:
        UserError: There are to be peers, and none runs here.
    """
    counts = {"ops": len([*ops.subjects(device)]), "layers": len([*layers.layers(device)])}
    if with_peers:
        counts["peers"] = len([*peers.subjects(device)])
        if not counts["peers"]:
            raise UserError("peers: they need a CUDA device and flash-linear-attention; leave --peers out here")
    counts["runs"] = 1
    return [Job(kind, number) for kind, count in counts.items() for number in range(count)]


def prove(job: Job, device: torch.device) -> list[Finding]:
    """The findings of one job."""
    if job.kind == "layers":
        return [*layers.prove(*[*layers.layers(device)][job.number], device)]
    if job.kind == "runs":
        return [*runs.prove()]
    subject = [*(ops if job.kind == "ops" else peers).subjects(device)][job.number]
    return [*ops.prove(subject)]


def findings(device: torch.device, every: list[Job], seen: Callable[[str], None]) -> dict[str, list[Finding]]:
    """The findings of all jobs by their kind; `seen` is called with the progress."""
    by_kind: dict[str, list[Finding]] = {job.kind: [] for job in every}
    for i, job in enumerate(every):
        seen(f"proofs, {i + 1} of {len(every)}")
        by_kind[job.kind] += prove(job, device)
    return by_kind
