"""The tables of the papers name tasks and metrics that exist, and have the papers' lengths and samples."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import zoo
from kernels import UserError
from reproductions.paper_tables import TABLES, evaluations, main
from tests.commands import Command
from tests.zoo.evaluation.lm_eval.conftest import Answering
from zoo.evaluation.lm_eval.paper_tasks import PAPER_TASKS
from zoo.evaluation.task import Options
from zoo.evaluation.tasks import tasks_of
from zoo.evaluation.tasks.needle_task import NeedleTask

METRICS = sorted(
    {
        (task, metric)
        for table in TABLES.values()
        for task, metrics in table.metrics.items()
        for metric in metrics.split()
    }
)
# tasks of Min et al. (2022) that lm-eval does not have; StateX averages over twelve, the table here over ten
MISSING = ("codah", "dream")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "metric"), METRICS)
def test_only_tasks_that_exist_are_named(task: str, metric: str) -> None:
    prefix, slash, name = task.partition("/")
    if not slash:
        assert tasks_of([task], Options())
        return
    assert prefix == "lm_eval"
    name = name.partition("@")[0]
    assert name in PAPER_TASKS

    from zoo.evaluation.lm_eval import building

    config = building.manager(name).task_index[name].cfg
    metrics = {entry["metric"] for entry in config.get("metric_list", [{"metric": "contains"}])}
    assert metric in metrics


def test_a_table_has_the_lengths_and_samples_of_its_paper() -> None:
    lengths = [4096, 8192, 16384, 32768, 65536]
    assert evaluations(["statex/table5"]) == [(["passkey", "s_niah_2"], lengths, 256)]
    assert evaluations(["statex/table5"], [128], 2) == [(["passkey", "s_niah_2"], [128], 2)]


def test_the_grid_of_the_scaling_law_paper() -> None:
    """35 lengths up to 16k, of which 8 and 17 are below 4k and 8k, at 35 depths."""
    common, easy = evaluations(["scaling_laws/table4"])
    (both,) = evaluations(["scaling_laws/table12"])
    names = [f"reproductions.niah.Niah{mode}" for mode in ("Easy", "Standard")]
    assert (common[1], easy[0], both[0]) == (None, names[:1], names)
    assert easy[1] == both[1]
    lengths = both[1]
    assert lengths is not None
    assert (len(lengths), lengths[0], lengths[-1]) == (35, 1000, 16_000)
    assert [sum(length <= most for length in lengths) for most in (4096, 8192)] == [8, 17]
    assert len({following - length for length, following in pairwise(lengths)} - {441, 442}) == 0
    tasks = tasks_of(both[0], Options(lengths=tuple(lengths)))
    assert [len(task.places) for task in tasks if isinstance(task, NeedleTask)] == [35, 35]


def test_evaluate_is_called_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], list[str], dict[str, Any]]] = []

    def evaluate(checkpoint: list[str], tasks: list[str], **options: Any) -> list[Any]:
        calls.append((checkpoint, tasks, options))
        return []

    monkeypatch.setattr(zoo, "evaluate", evaluate)
    main(["--checkpoint=runs/a", "--checkpoint", "runs/b", "--tables=gated_deltanet/table2,state_expansion/table11"])
    assert [(tasks, options["lengths"]) for _, tasks, options in calls] == [
        (["s_niah_1", "s_niah_2"], [1024, 2048, 4096, 8192]),
        (["s_niah_3"], [1024, 2048, 4096]),
        ([f"reproductions.cloze.{name}" for name in ("Fda", "Swde", "SquadCloze")], [2048]),
    ]
    assert all(checkpoint == ["runs/a", "runs/b"] for checkpoint, *_ in calls)


def test_the_list_of_tasks_has_those_of_the_papers(command: Command) -> None:
    actual = command("evaluate", "--tasks=list").ok()
    assert all(name in actual.out for name in ("lm_eval/piqa", "lm_eval/niah_single_1", "lm_eval/NAME"))
    assert "data: piqa.jsonl (baber/piqa, validation)" in actual.out


def test_what_lm_eval_lacks_is_said() -> None:
    assert not set(MISSING) & {task for task, _ in METRICS}
    assert all(name in TABLES["statex/table3"].measures for name in MISSING)


def test_a_whole_table_says_first_what_is_missing(tmp_path: Path) -> None:
    for tasks, *_ in evaluations(["gated_deltanet/table3"]):
        for task in tasks_of(tasks, Options(data=str(tmp_path))):
            with pytest.raises(UserError, match=re.escape(f"there is no {tmp_path}/")):
                task.cells(Answering())
