"""Ops of other libraries that are examined likewise: flash-linear-attention (FLA), and transformers' PyTorch paths."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from reproductions.peer_ops import PEERS, PeerOp
from reproductions.proofs import ops
from reproductions.proofs.fla import without_autotuning
from reproductions.proofs.op_calls import OpCall, cases
from reproductions.proofs.ops import DTYPES, Subject
from zoo.performance.doctor import Finding


def _case(peer: PeerOp) -> OpCall:
    """The call of the op here."""
    return next(each for each in cases(peer.size) if (each.op, each.variant) == peer.case)


def _here(device: torch.device) -> Iterator[tuple[PeerOp, str]]:
    """The peers that are installed and run on a device, each with each dtype."""
    for peer in PEERS:
        if peer.case is not None and peer.runs_on(device):
            for dtype in DTYPES:
                yield peer, dtype


def names(device: torch.device) -> list[str]:
    """The names of all calls of peers on a device; imports none of them."""
    return [f"{_case(peer).name}, {peer.label}, {dtype}" for peer, dtype in _here(device)]


def subject(device: torch.device, number: int) -> Subject:
    """One of the calls of peers on a device, by its number."""
    peer, dtype = [*_here(device)][number]
    if peer.package == "fla":
        without_autotuning(peer.module)
    case = replace(_case(peer), options={}, call=peer.load())
    return Subject(case.on(device, DTYPES[dtype]), peer.label, dtype)


def prove(device: torch.device, number: int, checks: Collection[str] | None = None) -> Iterator[Finding]:
    """The findings about a peer. They are noted, not failed: nobody here promises them."""
    try:
        here = subject(device, number)
    except Exception as error:  # of other versions of a library, of any type
        yield Finding(
            names(device)[number], "finished", "noted", f"{type(error).__name__}: {' '.join(str(error).split())}", {}
        )
        return
    for finding in ops.prove(here, checks):
        if finding.status == "failed":
            change = finding.numbers.get("change")
            says = f"{change:.0e}" if finding.check in ("rows", "packed") and change is not None else finding.says
            yield finding._replace(status="noted", says=says)
        else:
            yield finding
