"""Tables of the papers: which tasks, which metrics, at which lengths. `--tasks=gated_deltanet/table3` runs one."""

from dataclasses import dataclass, replace
from pathlib import Path

from zoo.evaluation.task import Options
from zoo.files.safe_yaml import read_yaml


@dataclass(frozen=True)
class Preset:
    """A table of a paper, an entry of `presets.yaml`.

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

    def choices(self, options: Options) -> list[tuple[str, Options]]:
        """The tasks to run, each with the paper's lengths and samples unless `options` have their own."""
        samples = self.samples if options.samples is None else options.samples
        chosen = []
        for task in self.metrics:
            own = self.lengths.get(task) if isinstance(self.lengths, dict) else self.lengths
            lengths = options.lengths if own is None or options.lengths is not None else tuple(own)
            chosen.append((task, replace(options, lengths=lengths, samples=samples)))
        return chosen


PRESETS = {name: Preset(**entry) for name, entry in read_yaml(Path(__file__).with_name("presets.yaml")).items()}
