"""The evaluations of the papers' tables, whose tasks, metrics, lengths and samples `paper_tables.yaml` has.

    python reproductions/paper_tables.py --checkpoint runs/lpt --checkpoint runs/statex --tables=statex/table5

It calls `evaluate` with them: what was measured is kept, and an interrupted evaluation continues where it stopped.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import zoo
from kernels import UserError
from zoo.arguments import check_names, names_in
from zoo.config.command_line import arguments_of
from zoo.evaluation.task import Options, Row
from zoo.evaluation.tasks import tasks_of
from zoo.files.safe_yaml import read_yaml


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, an entry of `paper_tables.yaml`.

    Attributes:
        measures: What it shows.
        needs: Which data it needs.
        metrics: Task → the metrics that the table prints, separated by spaces.
        lengths: In tokens, for all tasks or by task; None, or a task that is missing, for each task's own.
        samples: For each length; None for each task's own.
    """

    measures: str
    needs: str
    metrics: dict[str, str]
    lengths: list[int] | dict[str, list[int]] | None = None
    samples: int | None = None

    def groups(self) -> list[tuple[list[str], list[int] | None]]:
        """The tasks, by their lengths."""
        groups: dict[tuple[int, ...] | None, list[str]] = {}
        for task in self.metrics:
            lengths = self.lengths.get(task) if isinstance(self.lengths, dict) else self.lengths
            groups.setdefault(None if lengths is None else tuple(lengths), []).append(task)
        return [(tasks, None if lengths is None else [*lengths]) for lengths, tasks in groups.items()]


TABLES = {name: PaperTable(**entry) for name, entry in read_yaml(Path(__file__).with_suffix(".yaml")).items()}


def paper_tables(
    checkpoint: list[str] | str,
    tables: list[str] | str,
    lengths: list[int] | None = None,
    samples: int | None = None,
    data: str | None = None,
    output: str | None = None,
    device: str | None = None,
    trust: bool = False,
) -> list[Row]:
    """Measure what tables of the papers show.

    Args:
        checkpoint: As in `evaluate`.
        tables: Names of `paper_tables.yaml`, such as statex/table5, as a list or separated by commas.
        lengths: Lengths in tokens; null for the paper's.
        samples: Samples per cell; null for the paper's.
        data: The folder with the files of tasks that need data; `hub` lets lm-eval download them.
        output: The folder for rows.jsonl and pictures; null: evaluations/NAME, after the checkpoints.
        device: cpu or cuda; null for the GPU if available.
        trust: Import and call what a model's config names, even if someone else wrote it.

    Raises:
        UserError: A table does not exist, or as in `evaluate`.
    """
    rows: list[Row] = []
    for tasks, its_lengths, its_samples in evaluations(tables, lengths, samples):
        rows += zoo.evaluate(
            checkpoint,
            tasks,
            lengths=its_lengths,
            samples=its_samples,
            data=data if any("data" in task.uses for task in tasks_of(tasks, Options())) else None,
            output=output,
            device=device,
            trust=trust,
        )
    return rows


def evaluations(
    tables: list[str] | str, lengths: list[int] | None = None, samples: int | None = None
) -> list[tuple[list[str], list[int] | None, int | None]]:
    """Tasks, lengths and samples of the calls of `evaluate` for these tables.

    Raises:
        UserError: A table does not exist.
    """
    names = names_in(tables)
    check_names("tables", names, TABLES)
    return [
        (tasks, its_lengths if lengths is None else lengths, TABLES[name].samples if samples is None else samples)
        for name in names
        for tasks, its_lengths in TABLES[name].groups()
    ]


def main(arguments: list[str]) -> None:
    """Run the command line."""
    _, options = arguments_of(paper_tables, arguments, "paper_tables")
    paper_tables(**options)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
