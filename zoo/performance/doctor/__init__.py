"""`zoo.doctor`: whether this machine computes what it should, as tables for the terminal and as JSON."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernels import UserError
from zoo.display import new_table
from zoo.files.atomic import atomic_write
from zoo.performance.doctor.checks import Finding, compile_ahead, compile_by, examine_layers, examine_ops
from zoo.performance.doctor.machine import machine
from zoo.performance.doctor.proofs import EXPLAINED as PROPERTIES
from zoo.performance.doctor.proofs import ORDER, TITLES, findings, jobs, prove
from zoo.train.devices import pick_device

EXPLAINED = """\
path: the implementation that runs
fp32, bf16: relative error of outputs and gradients against the fp32 loop
bf16 of mixers: relative error of whole layers against fp32
packed: a document does not depend on its neighbours
repeats: results are the same bits each time
"""
STYLES = {"passed": "green", "noted": "yellow", "failed": "bold red"}


class Examination(NamedTuple):
    """All findings of the doctor.

    Attributes:
        device: Where ops and mixers ran.
        machine: Packages, GPU, memory, disk.
        ops: The ops, each with several checks.
        mixers: The registered mixers, each with several checks.
        seconds: How long it took.
        proofs: With `proofs`, the properties of ops, mixers and a model, and runs.
    """

    device: str
    machine: list[Finding]
    ops: list[Finding]
    mixers: list[Finding]
    seconds: float
    proofs: Mapping[str, list[Finding]] = MappingProxyType({})

    @property
    def failures(self) -> list[Finding]:
        """The checks that failed."""
        groups = (self.machine, self.ops, self.mixers, *self.proofs.values())
        return [each for group in groups for each in group if each.status == "failed"]

    @property
    def failed(self) -> bool:
        """Return whether a check failed."""
        return bool(self.failures)


def doctor(
    device: str | None = None,
    output: str | None = None,
    verbose: bool = True,
    proofs: bool = False,
    peers: bool = False,
) -> Examination:
    """Check that this machine computes what it should: packages, GPU, every op against its fp32 loop, memory and disk.

    ``python cli.py doctor``

    Args:
        device: cpu or cuda; null for the GPU if there is one.
        output: A JSON file for all findings.
        verbose: Whether to print tables.
        proofs: Whether to examine instead what holds to the bit, and how nearly the rest does: causality, packed
            documents, rows of a batch, pieces, gradients of extreme gates, memory.
        peers: With `proofs`, whether the ops of flash-linear-attention are examined too, on a GPU.

    Raises:
        UserError: The device does not exist, the peers do not run on it, or the file cannot be written.
    """
    if peers and not proofs:
        raise UserError("peers: only the proofs have peers; add --proofs=true")
    if output is not None and Path(output).is_dir():
        raise UserError(f"output: {output} is a folder; name a file, such as doctor.json")
    place, start = pick_device(device), monotonic()
    every = jobs(place, peers) if proofs else []
    console = Console(quiet=not verbose)
    with console.status("packages") as status:
        about, of_ops, of_mixers = [*machine(place)], list[Finding](), list[Finding]()
        proved: dict[str, list[Finding]] = {}
        if proofs:
            ahead = [job for job in every if job.kind in ("ops", "layers")]
            compile_by(partial(prove, device=place), ahead, place, status.update)
            proved = findings(place, every, status.update)
        else:
            compile_ahead(place, status.update)
            of_ops = [*examine_ops(place, status.update)]
            of_mixers = [*examine_layers(place, status.update)]
    examination = Examination(place.type, about, of_ops, of_mixers, monotonic() - start, proved)
    if output is not None:
        _write(examination, Path(output))
    if proofs:
        tables = [
            _matrix(TITLES[kind], sorted(group, key=lambda each: ORDER.index(each.check)))
            for kind, group in proved.items()
        ]
        console.print(_list(about), *tables, PROPERTIES, highlight=False)
    else:
        console.print(_list(about), _matrix("op", of_ops), _matrix("mixer", of_mixers), EXPLAINED, highlight=False)
    for each in examination.failures:
        console.print(f"[bold red]failed[/bold red] {escape(str(each))}", highlight=False, soft_wrap=True)
    checks = sum(map(len, (about, of_ops, of_mixers, *proved.values())))
    verdict = (
        f"{len(examination.failures)} of {checks} checks failed"
        if examination.failed
        else f"all {checks} checks passed"
    )
    written = "" if output is None else f"; written to {output}"
    console.print(f"{verdict}, in {examination.seconds:.0f} s{written}", highlight=False, soft_wrap=True)
    return examination


def _list(findings: Sequence[Finding]) -> Table:
    table = new_table(["machine", ""], left=2, wrapped=[""])
    for each in findings:
        says = f"[{STYLES[each.status]}]{escape(each.says)}[/]"
        table.add_row(
            each.subject if each.check in ("versions", "device", "free") else f"{each.subject} ({each.check})", says
        )
    return table


def _matrix(what: str, findings: Sequence[Finding]) -> Table:
    """A row for each subject, a column for each check."""
    checks = [*dict.fromkeys(each.check for each in findings)]
    table = new_table([what, *checks], left=1 + len(checks), wrapped=[what])  # names wrap, and no number is cut
    rows: dict[str, dict[str, str]] = {}
    for each in findings:
        says = "failed" if each.status == "failed" else each.says  # the sentence comes below the table
        rows.setdefault(each.subject, {})[each.check] = f"[{STYLES[each.status]}]{escape(says)}[/]"
    for subject, cells in rows.items():
        table.add_row(subject, *(cells.get(check, "") for check in checks))
    return table


def _write(examination: Examination, file: Path) -> None:
    groups = {group: getattr(examination, group) for group in ("machine", "ops", "mixers")}
    groups |= {f"proofs of {kind}": group for kind, group in examination.proofs.items()}
    record = {"device": examination.device, "passed": not examination.failed, "seconds": round(examination.seconds, 1)}
    record |= {name: [each._asdict() for each in group] for name, group in groups.items()}
    try:
        with atomic_write(file) as opened:
            opened.write(json.dumps(record, indent=1).encode())
    except OSError as error:
        raise UserError(f"output: {file} cannot be written: {error.strerror}") from None
