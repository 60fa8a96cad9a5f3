"""Examine which properties of ops, mixers, a model and runs hold to the bit on this machine, and how nearly others do.

    python -m reproductions.proofs --output=proofs.json

[docs/proofs.md](../../docs/proofs.md) explains each property. The exit code is 1 if a promised one does not hold.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernels import UserError
from reproductions.proofs.jobs import CHECKS, EXPLAINED, ORDER, TITLES, Job, by_kind, jobs, proved
from reproductions.proofs.workers import Done
from zoo.arguments import names_in
from zoo.config.command_line import arguments_of
from zoo.display import new_console, new_table
from zoo.files.atomic import atomic_write
from zoo.files.output import check_record
from zoo.performance.doctor import STYLES, Finding
from zoo.train.devices import pick_device

WIDE = 110  # columns of a terminal, for a table of proofs
LONGEST = 24  # characters of a cell; longer results are sentences below the tables
LIMIT_S = 300  # of one op, layer or peer; a kernel that hangs takes no longer


def proofs(
    device: str | None = None,
    output: str | None = None,
    peers: bool = False,
    only: str | None = None,
    checks: list[str] | str | None = None,
    time_limit: float = LIMIT_S,
) -> dict[str, list[Finding]]:
    """Examine causality, packed documents, rows of a batch, pieces, gradients of extreme gates, memory and runs.

    Args:
        device: cpu or cuda; null for the GPU if there is one.
        output: A JSON file for all findings, which is written after each op.
        peers: Whether to examine also ops of transformers in PyTorch and, on a GPU, of flash-linear-attention.
        only: A part of the names of what to examine, such as delta_rule; null for everything.
        checks: The properties to examine, such as invariant,sampled,processes; null for all.
        time_limit: Seconds for each op, layer or peer on a GPU; what takes longer is stopped, and fails.

    Returns:
        The findings about ops, layers, peers and runs.

    Raises:
        UserError: The device does not exist, no peer runs on it, nothing is to be examined, or the file cannot be
            written.
        KeyboardInterrupt: Ctrl-C; the findings so far are printed and written.
    """
    if output is not None:
        check_record(Path(output), ("device", "passed", "finished"), "output", "the proofs")
    place, start, finished = pick_device(device), monotonic(), False
    every, console = jobs(place, peers, only, CHECKS if checks is None else names_in(checks)), new_console()
    by_job: dict[Job, list[Finding]] = {}
    try:
        for number, done in enumerate(proved(place, every, time_limit), 1):
            by_job[done.job] = done.results
            if done.results:  # of the chosen checks, perhaps none applies
                console.print(f"{number}/{len(every)} {escape(_line(done))}", highlight=False, soft_wrap=True)
            if output is not None:
                _write(Path(output), place, by_kind(every, by_job), False, monotonic() - start)
        finished = True
    finally:
        groups = by_kind(every, by_job)
        if output is not None:
            _write(Path(output), place, groups, finished, monotonic() - start)
        _print(console, groups, finished)
    return groups


def failures(groups: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """The checks that failed."""
    return [each for group in groups.values() for each in group if each.status == "failed"]


def _line(done: Done[Job, Finding]) -> str:
    """Name a job, and say what was found."""
    says = (f"{each.check} {'failed' if each.status == 'failed' else each.says}" for each in done.results)
    return f"{done.job.name}: {', '.join(says)} ({done.seconds:.1f} s)"


def _print(console: Console, groups: Mapping[str, Sequence[Finding]], finished: bool) -> None:
    """Print all findings as tables, then failures and long notes."""
    for kind, group in groups.items() if console.width >= WIDE else ():
        console.print(_matrix(TITLES[kind], sorted(group, key=lambda each: ORDER.index(each.check))))
    console.print(EXPLAINED, highlight=False)
    every, wrong = [each for group in groups.values() for each in group], failures(groups)
    for each in [*wrong, *(each for each in every if each.status != "failed" and _is_below_the_tables(each))]:
        console.print(f"[{STYLES[each.status]}]{each.status}[/] {escape(str(each))}", highlight=False, soft_wrap=True)
    verdict = f"{len(wrong)} of {len(every)} checks failed" if wrong else f"all {len(every)} checks passed"
    console.print(verdict if finished else f"stopped; {verdict} so far", highlight=False)


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


def _write(
    file: Path, device: torch.device, groups: Mapping[str, Sequence[Finding]], finished: bool, seconds: float
) -> None:
    record = {"device": device.type, "passed": finished and not failures(groups)}
    record |= {"finished": finished, "seconds": round(seconds, 1)}
    record |= {f"proofs of {kind}": [each._asdict() for each in group] for kind, group in groups.items()}
    with atomic_write(file) as opened:
        opened.write(json.dumps(record, indent=1).encode())


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code is 1 if a check failed."""
    return int(bool(failures(proofs(**arguments_of(proofs, arguments, "proofs")[1]))))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
