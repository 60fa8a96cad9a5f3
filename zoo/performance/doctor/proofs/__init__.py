"""`doctor --proofs`: which properties hold on this machine to the bit, and how nearly the others do."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from zoo.performance.doctor.checks import Finding
from zoo.performance.doctor.proofs import layers, ops, peers, runs

EXPLAINED = """\
causal: no bit of an output depends on later tokens
packed: a packed document has the outputs, states and gradients that it has alone
rows: a row of a batch has the results that it has alone
pieces: a sequence in pieces, of one token too, or decoded, has the results of one call
gates: outputs and gradients against fp64, for decays from none to resets; of decays against the largest such gradient
one token: the decay's gradient from documents of one token, which is 0
repeats: results are the same bits each time
memory: nothing outside of the tensors is read or written
resumed: a run that is continued has the losses of one that was not stopped
2 processes: a sequence that two processes share has the losses of one process
"""


class Job(NamedTuple):
    """Something to prove: an op's call by its number, or a layer by its name and dtype."""

    kind: str  # ops | layers | peers | runs
    number: int


def jobs(device: torch.device, with_peers: bool) -> list[Job]:
    """Everything to prove on a device."""
    counts = {"ops": len([*ops.subjects(device)]), "layers": len([*layers.layers(device)])}
    if with_peers:
        counts["peers"] = len([*peers.subjects(device)])
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


def findings(device: torch.device, with_peers: bool, seen: Callable[[str], None]) -> Iterator[Finding]:
    """All findings on a device; `seen` is called with the progress."""
    every = jobs(device, with_peers)
    for i, job in enumerate(every):
        seen(f"proofs, {i + 1} of {len(every)}")
        yield from prove(job, device)
