"""A task of lm-eval as a task of this project: `lm_eval/NAME`, or `lm_eval/NAME@8` with 8 examples in each prompt."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import UserError
from zoo.evaluation.lm_eval.paper_tasks import BABILONG, PAPER_TASKS, is_ruler
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Options, Row, Task, proportion
from zoo.files.hashing import file_digest

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

PREFIX = "lm_eval/"
RULER_LENGTH = 4096  # lm-eval's default
BABILONG_LENGTHS = {0: "0k"} | {1024 * k: f"{k}k" for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
Z = 1.96  # standard errors in half an interval of 95 %


class LmEval(Task):
    """A task, a group or a tag of lm-eval; see `lm_eval_task`.

    `lengths` are the tokens that the model reads of a prompt and its answer. RULER generates prompts of each length,
    4096 unless one is chosen; BABILong has data of each; and every other prompt that is longer loses its beginning.
    Without `lengths`, prompts stay whole.

    Raises:
        UserError: lm-eval is not installed.
    """

    version = 2
    tasks: ClassVar[str]  # lm-eval's name
    shots: ClassVar[int | None] = None
    folder: ClassVar[Path | None] = None  # with the configs of its tasks; None for those of lm-eval
    source: ClassVar[str] = "its data set"  # the public data set; `paper_tasks.csv` has those of its tasks
    file: ClassVar[str | None] = None  # of the data, without its suffix, if it is not called like the task

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        try:
            import lm_eval.evaluator  # noqa: F401
        except ImportError:
            raise UserError(f"{self.name}: needs lm-eval; pip install 'token-mixer-zoo[eval]'") from None

    @property
    def uses(self) -> tuple[str, ...]:
        return ("data",)

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """A cell for each task and length. Every task is built once, so that missing or odd data is reported first."""
        from zoo.evaluation.lm_eval.building import names

        if subject.tokenizer is None:
            raise UserError(f"{self.name}: needs a tokenizer, and the model was trained without one")
        members = names(self.tasks, self.folder)
        cells = []
        for member in members:
            which: Cell = {} if members == [self.tasks] else {"subtask": member}
            default = (RULER_LENGTH,) if is_ruler(member) else (0,) if member in BABILONG else (None,)
            cells += [
                which | ({} if length is None else {"length": length}) for length in self.options.lengths or default
            ]
        for cell in cells:
            self.build(subject, cell)
        return cells

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """A row for each metric."""
        from lm_eval.evaluator import evaluate

        from zoo.evaluation.lm_eval.building import quiet
        from zoo.evaluation.lm_eval.model import SubjectLM

        name, task = cell.get("subtask", self.tasks), self.build(subject, cell)
        ruler = is_ruler(name)
        max_length = None if ruler or name in BABILONG else cell.get("length")
        with quiet():
            evaluated = evaluate(
                SubjectLM(subject, max_length),
                {"tasks": {name: task}, "groups": {}, "group_map": {}},
                limit=self.options.samples,
                bootstrap_iters=0,  # ours are intervals of means
            )
        versions = {
            "shots": task.config.num_fewshot,
            "lm_eval": version("lm_eval"),
            "version": evaluated["versions"][name],
        }
        rows = []
        for key, value in evaluated["results"][name].items():
            metric, _, filter_ = key.partition(",")
            if not filter_ or metric.endswith("_stderr"):
                continue
            score = metric
            if ruler:
                if metric != str(cell["length"]):  # -1 at all other lengths
                    continue
                metric = "accuracy"
            samples = [sample for sample in evaluated["samples"][name] if sample["filter"] == filter_]
            values = [sample.get(score) for sample in samples]
            label = metric if filter_ == "none" else f"{metric} ({filter_})"
            rows.append({**cell, "metric": label, **_statistics(value, values), **versions})
        return rows

    def sources(self, cell: Cell) -> dict[str, str]:
        """Hashes of the data's files."""
        from zoo.evaluation.lm_eval.building import HUB
        from zoo.evaluation.lm_eval.local_data import files_of

        data = self.options.data
        if data is None or data == HUB:
            return {}
        files = files_of(Path(data).expanduser(), self._file(cell))
        return {str(file): file_digest(file) for file in files}

    def _file(self, cell: Cell) -> str:
        """The data's file or folder in the data folder, without a suffix."""
        name, length = cell.get("subtask", self.tasks), cell.get("length")
        listed = PAPER_TASKS.get(name)
        if name not in BABILONG:
            return self.file or (listed and listed.file) or name
        if length not in BABILONG_LENGTHS:  # it has other documents for each
            lengths = ", ".join(map(str, BABILONG_LENGTHS))
            raise UserError(f"lengths: BABILong has no {length}; its lengths are {lengths} (0 if left out)")
        return f"{name}/{BABILONG_LENGTHS[length]}"

    def build(self, subject: LoadedModel, cell: Cell) -> "ConfigurableTask":
        """Return lm-eval's task of a cell, with its documents.

        Raises:
            UserError: Its data is missing or does not fit.
        """
        from zoo.evaluation.lm_eval.building import HUB, build, tokenizer_folder

        name, length, tokenizer = cell.get("subtask", self.tasks), cell.get("length"), subject.tokenizer
        assert tokenizer is not None
        data, file, listed = self.options.data, self._file(cell), PAPER_TASKS.get(name)
        if data is None and (listed is None or listed.source):
            raise UserError(
                f"data: {self.name} needs a folder with {file}.jsonl, which holds "
                f"{listed.source if listed else self.source}; or data={HUB}, which lets lm-eval download it"
            )
        with tokenizer_folder(tokenizer) as folder:
            metadata: dict[str, Any] = {}
            if name in BABILONG:
                metadata = {"max_seq_lengths": file.rpartition("/")[2]}
            elif is_ruler(name):
                metadata = {"max_seq_lengths": [length], "tokenizer": folder}
            options: dict[str, Any] = {"seed": self.options.seed, "shots": self.shots, "folder": self.folder}
            return build(name, data or "", file, metadata=metadata, **options)


def _statistics(value: float, values: Sequence[Any]) -> Row:
    """The entries of a row for a metric, with an interval if it is the mean of numbers, one for each document."""
    counted = [x for x in values if isinstance(x, bool | int | float)]
    row: Row = {"value": float(value), "count": len(values)}
    if len(counted) < max(2, len(values)) or abs(fmean(counted) - value) > 1e-9:
        return row
    if set(counted) <= {0, 1}:
        return proportion(round(sum(counted)), len(counted))
    half = Z * stdev(counted) / len(counted) ** 0.5
    return row | {"low": value - half, "high": value + half}


def lm_eval_task(name: str) -> type[LmEval]:
    """The task `lm_eval/NAME`, as a class like that of every other task.

    Args:
        name: A task, group or tag of lm-eval, with or without `lm_eval/` before and `@SHOTS` behind it.

    Raises:
        UserError: What follows the `@` is not a number.
    """
    name = name.removeprefix(PREFIX)
    base, at, shots = name.partition("@")
    if at and not (shots.isdecimal()):
        raise UserError(f"tasks: in {PREFIX}{name}, {shots!r} should be the number of examples in each prompt")
    listed = PAPER_TASKS.get(base)
    needs = "data: lm-eval's of this name"
    if listed is not None:
        file = f"{base}/0k" if base in BABILONG else listed.file or base
        needs = f"data: {file}.jsonl ({listed.source})" if listed.source else "a tokenizer"
    return type(
        "LmEval",
        (LmEval,),
        {
            "__doc__": LmEval.__doc__,
            "name": PREFIX + name,
            "measures": listed.measures if listed else "what lm-eval says of it",
            "needs": needs,
            "tasks": base,
            "shots": int(shots) if at else None,
        },
    )
