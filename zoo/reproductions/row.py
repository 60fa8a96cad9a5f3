"""One table or figure of a paper. The constructors' arguments are the keys of its YAML."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

from kernels import UserError
from zoo.reproductions.measured import Measured

Status = Literal["contradicted", "partly", "reproduced", "not run"]


@dataclass(frozen=True)
class Needs:
    """Resources that a table or figure takes at the paper's size.

    Args:
        gpu_hours: Hours of one H200.
        arithmetic: Where the hours come from.
        data: Corpora, tokenizers, public checkpoints and benchmarks; null: none.
        missing: What this project lacks for it, such as "a config for …"; null: nothing.
    """

    gpu_hours: float
    arithmetic: str
    data: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Ours:
    """Our measurement.

    Args:
        result: What came out, in words.
        date: When, as YYYY-MM-DD.
        machine: On what.
        seeds: How many seeds; null where nothing is drawn at random.
        size: Of the models and their data.
        command: What measured it: `python cli.py …` or `python tutorials/…`, or `pytest …` where a test enforces it.
        sources: Files of this repository that hold the numbers, or tests that hold the result.
        spread_hides_effect: Whether the seeds differ by more than what they are to show.
        measured: The numbers, as a file has them; null where `result` or a test has them.
    """

    result: str
    date: str
    machine: str
    seeds: int | None
    size: str
    command: str
    sources: list[str]
    spread_hides_effect: bool = False
    measured: Measured | None = None


@dataclass(frozen=True)
class Row:
    """A table or figure.

    Args:
        claim: What it claims, in a sentence.
        status: Whether our measurement agrees with the claim.
        needs: What it takes at the paper's size.
        commands: What repeats it at the paper's size, or in miniature where the note says so.
        printed: The paper's numbers that matter most for the claim, by what they are of.
        ours: What we measured; null if nothing.
        note: What else a reader has to know; null: nothing.
        picture: Path of a picture of what we measured; null: none.

    Raises:
        UserError: The status does not fit what was measured, there is neither a command nor a reason for that, or
            what we measured has no date, command or source.
    """

    claim: str
    status: Status
    needs: Needs
    commands: list[str] | None = None
    printed: dict[str, float | str | list[float]] | None = None
    ours: Ours | None = None
    note: str | None = None
    picture: str | None = None

    def __post_init__(self) -> None:
        if (self.status == "not run") != (self.ours is None):
            needed = "must be left out" if self.ours is not None else "must say what was measured"
            raise UserError(f"status: it is {self.status!r}, so `ours` {needed}")
        if not self.commands and self.needs.missing is None:
            raise UserError("commands: there are none; needs.missing must say what they lack, such as 'a config for …'")
        for command in self.commands or []:
            if not command.startswith("python cli.py "):
                raise UserError(f"commands: {command!r} does not begin with 'python cli.py'")

        if self.ours is not None:
            _check(self.ours)

    @property
    def stands_first(self) -> bool:
        """Return whether readers have to be warned: it contradicts its paper, or the spread over seeds hides the
        effect.
        """
        return self.status == "contradicted" or (self.ours is not None and self.ours.spread_hides_effect)


def _check(ours: Ours) -> None:
    """Not by `Ours` itself, since the parser would bury the sentence in a list of types that it tried."""
    try:
        date.fromisoformat(ours.date)
    except ValueError:
        raise UserError(f"ours.date: {ours.date!r} is not a date; write YYYY-MM-DD") from None
    if not ours.sources:
        raise UserError("ours.sources: the list is empty; name the file or the test that holds the result")
    if not ours.command.startswith(("python cli.py ", "python tutorials/", "pytest ")):
        raise UserError(
            f"ours.command: {ours.command!r} begins neither with 'python cli.py' nor with 'python tutorials/', nor "
            "with 'pytest'"
        )
