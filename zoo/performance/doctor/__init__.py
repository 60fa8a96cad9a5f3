"""`zoo.doctor`: whether this machine computes what it should, as tables for the terminal and as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernels import UserError
from zoo.display import new_console, new_table
from zoo.files.atomic import atomic_write
from zoo.files.output import check_record
from zoo.performance.doctor.checks import LIMIT_S, Finding, examine
from zoo.performance.doctor.machine import machine
from zoo.performance.doctor.proofs import EXPLAINED as PROPERTIES
from zoo.performance.doctor.proofs import ORDER, TITLES, Job, by_kind, jobs, proved
from zoo.performance.doctor.workers import Done
from zoo.train.devices import pick_device

EXPLAINED = """\
path: the implementation that runs
fp32, bf16: relative error of outputs and gradients against the fp32 loop
bf16 of mixers: relative error of whole layers against fp32
packed: a document does not depend on its neighbours
repeats: results are the same bits each time
"""
WIDE = 110  # columns of a terminal, for a table of proofs
LONGEST = 24  # characters of a cell; longer results are sentences below the tables
STYLES = {"passed": "green", "noted": "yellow", "failed": "bold red"}


class Examination(NamedTuple):
    """All findings of the doctor.

    Attributes:
        device: Where ops and mixers ran.
        machine: Packages, GPU, memory, disk.
        ops: The ops, each with several checks.
        mixers: The registered mixers, each with several checks.
        seconds: How long it took.
        proofs: With `proofs`, the properties of ops, mixers and a model, runs, and peers.
        finished: Whether everything was examined.
    """

    device: str
    machine: list[Finding]
    ops: list[Finding]
    mixers: list[Finding]
    seconds: float = 0.0
    proofs: Mapping[str, list[Finding]] = MappingProxyType({})
    finished: bool = False

    @property
    def findings(self) -> list[Finding]:
        """All findings."""
        return [*self.machine, *self.ops, *self.mixers, *(each for group in self.proofs.values() for each in group)]

    @property
    def failures(self) -> list[Finding]:
        """The checks that failed."""
        return [each for each in self.findings if each.status == "failed"]

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
    only: str | None = None,
    time_limit: float = LIMIT_S,
) -> Examination:
    """Check that this machine computes what it should: packages, GPU, every op against its fp32 loop, memory and disk.

    ``python cli.py doctor``

    Args:
        device: cpu or cuda; null for the GPU if there is one.
        output: A JSON file for all findings; with `proofs` it is written after each op.
        verbose: Whether to print tables.
        proofs: Whether to examine instead what holds to the bit, and how nearly the rest does: causality, packed
            documents, rows of a batch, pieces, gradients of extreme gates, memory.
        peers: With `proofs`, whether to examine also ops of transformers in PyTorch and, on a GPU, of
            flash-linear-attention.
        only: With `proofs`, a part of the names of what to examine, such as delta_rule; null for everything.
        time_limit: Seconds for each op, layer or peer on a GPU with `proofs`; what takes longer is stopped, and fails.

    Raises:
        UserError: The device does not exist, no peer runs on it, nothing is to be examined, or the file cannot be
            written.
        KeyboardInterrupt: Ctrl-C; the findings so far are printed and written.
    """
    for name, value in {"peers": peers or None, "only": only}.items():
        if value is not None and not proofs:
            raise UserError(f"{name}: this is about proofs; add --proofs=true")
    if output is not None and Path(output).is_dir():
        raise UserError(f"output: {output} is a folder; name a file, such as doctor.json")
    if output is not None:
        check_record(Path(output), ("device", "passed", "machine", "ops", "mixers"), "output", "the doctor")
    place, start, stopped = pick_device(device), monotonic(), False
    by_job: dict[Job, list[Finding]] = {}
    every = jobs(place, peers, only) if proofs else []
    console = new_console(verbose)
    with console.status("packages") as status:
        examination = Examination(place.type, [*machine(place)], [], [])
        if not proofs:
            of_ops, of_mixers = examine(place, status.update)
            examination = examination._replace(ops=of_ops, mixers=of_mixers)
        try:
            for number, done in enumerate(proved(place, every, time_limit), 1):
                by_job[done.job] = done.results
                examination = examination._replace(proofs=by_kind(every, by_job), seconds=monotonic() - start)
                console.print(f"{number}/{len(every)} {escape(_line(done))}", highlight=False, soft_wrap=True)
                if output is not None:
                    _write(examination, Path(output))
        except KeyboardInterrupt:
            stopped = True
    examination = examination._replace(finished=not stopped, seconds=monotonic() - start)
    if output is not None:
        _write(examination, Path(output))
    _print(console, examination, output)
    if stopped:
        raise KeyboardInterrupt
    return examination


def _line(done: Done[Job, Finding]) -> str:
    """Name a job, and say what was found."""
    says = (f"{each.check} {'failed' if each.status == 'failed' else each.says}" for each in done.results)
    return f"{done.job.name}: {', '.join(says)} ({done.seconds:.1f} s)"


def _print(console: Console, examination: Examination, output: str | None) -> None:
    """Print all findings as tables, then failures and long notes."""
    if examination.proofs:  # whose lines have said the same in a narrow terminal
        groups = examination.proofs.items() if console.width >= WIDE else []
        tables = [
            _matrix(TITLES[kind], sorted(group, key=lambda each: ORDER.index(each.check))) for kind, group in groups
        ]
        console.print(_list(examination.machine), *tables, PROPERTIES, highlight=False)
        in_tables = [each for _, group in groups for each in group]
    else:
        in_tables = [*examination.ops, *examination.mixers]
        tables = [_matrix("op", examination.ops), _matrix("mixer", examination.mixers)]
        console.print(_list(examination.machine), *tables, EXPLAINED, highlight=False)
    long = [each for each in in_tables if each.status != "failed" and _is_below_the_tables(each)]
    for each in [*examination.failures, *long]:
        console.print(f"[{STYLES[each.status]}]{each.status}[/] {escape(str(each))}", highlight=False, soft_wrap=True)
    failures, checks = len(examination.failures), len(examination.findings)
    verdict = f"{failures} of {checks} checks failed" if failures else f"all {checks} checks passed"
    if not examination.finished:
        verdict = f"stopped; {failures} of {checks} checks failed so far"
    written = "" if output is None else f"; written to {output}"
    console.print(f"{verdict}, in {examination.seconds:.0f} s{written}", highlight=False, soft_wrap=True)


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
        says = each.status if _is_below_the_tables(each) else each.says
        rows.setdefault(each.subject, {})[each.check] = f"[{STYLES[each.status]}]{escape(says)}[/]"
    for subject, cells in rows.items():
        table.add_row(subject, *(cells.get(check, "") for check in checks))
    return table


def _is_below_the_tables(finding: Finding) -> bool:
    """Return whether a finding is printed below the tables: a failure, or a result that is too long for a cell."""
    return finding.status == "failed" or len(finding.says) > LONGEST


def _write(examination: Examination, file: Path) -> None:
    groups = {group: getattr(examination, group) for group in ("machine", "ops", "mixers")}
    groups |= {f"proofs of {kind}": group for kind, group in examination.proofs.items()}
    record = {"device": examination.device, "passed": examination.finished and not examination.failed}
    record |= {"finished": examination.finished, "seconds": round(examination.seconds, 1)}
    record |= {name: [each._asdict() for each in group] for name, group in groups.items()}
    try:
        with atomic_write(file) as opened:
            opened.write(json.dumps(record, indent=1).encode())
    except OSError as error:
        raise UserError(f"output: {file} cannot be written: {error.strerror}") from None
