"""Presets name tasks and metrics that exist."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from kernels import UserError
from tests.commands import Command
from tests.zoo.evaluation.lm_eval.conftest import Answering
from zoo.evaluation.lm_eval.paper_tasks import PAPER_TASKS
from zoo.evaluation.lm_eval.presets import PRESETS
from zoo.evaluation.task import Options
from zoo.evaluation.tasks import TASKS, tasks_of
from zoo.evaluation.tasks.needle_task import NeedleTask

pytest_plugins = "tests.desk"
METRICS = sorted(
    {
        (task, metric)
        for preset in PRESETS.values()
        for task, metrics in preset.metrics.items()
        for metric in metrics.split()
    }
)
# tasks of Min et al. (2022) that lm-eval does not have; StateX averages over twelve, the preset over ten
MISSING = ("codah", "dream")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "metric"), METRICS)
def test_presets_name_only_tasks_that_exist(task: str, metric: str) -> None:
    prefix, slash, name = task.partition("/")
    if not slash:
        assert prefix in TASKS
        return
    assert prefix == "lm_eval"
    name = name.partition("@")[0]
    assert name in PAPER_TASKS

    from zoo.evaluation.lm_eval import building

    config = building.manager(name).task_index[name].cfg
    metrics = {entry["metric"] for entry in config.get("metric_list", [{"metric": "contains"}])}
    assert metric in metrics


def test_a_preset_has_the_lengths_and_samples_of_its_paper() -> None:
    choices = dict(PRESETS["statex/table5"].choices(Options(seed=3)))
    assert choices["passkey"] == Options(lengths=(4096, 8192, 16384, 32768, 65536), samples=256, seed=3)
    choices = dict(PRESETS["statex/table5"].choices(Options(lengths=(128,), samples=2)))
    assert choices["passkey"] == Options(lengths=(128,), samples=2)


def test_the_grid_of_the_scaling_law_paper() -> None:
    """35 lengths up to 16k, of which 8 and 17 are below 4k and 8k, at 35 depths."""
    grids = [dict(PRESETS[f"scaling_laws/{table}"].choices(Options())) for table in ("table4", "table12")]
    lengths = grids[1]["niah_easy"].lengths
    assert lengths is not None
    assert (len(lengths), lengths[0], lengths[-1]) == (35, 1000, 16_000)
    assert [sum(length <= most for length in lengths) for most in (4096, 8192)] == [8, 17]
    assert len({following - length for length, following in pairwise(lengths)} - {441, 442}) == 0
    assert grids[0]["niah_easy"].lengths == grids[1]["niah_standard"].lengths == lengths
    assert grids[0]["lm_eval/piqa"].lengths is None
    both = tasks_of(["scaling_laws/table4", "scaling_laws/table12"], Options())
    assert [len(task.places) for task in both if isinstance(task, NeedleTask)] == [35, 35]


def test_presets_run_their_tasks() -> None:
    tasks = tasks_of(["state_expansion/table11", "lm_eval/piqa"], Options(data="folder"))
    assert [task.name for task in tasks] == [
        "lm_eval/fda",
        "lm_eval/swde",
        "lm_eval/squad_cloze",
        "lm_eval/piqa",
    ]
    assert [task.options.lengths for task in tasks] == [(2048,)] * 3 + [None]
    with pytest.raises(UserError, match="tasks: lm_eval/fda is wanted at different lengths"):
        tasks_of(["state_expansion/table4", "state_expansion/table11"], Options())


def test_the_list_of_tasks_has_them(command: Command) -> None:
    actual = command("evaluate", "--tasks=list")
    assert actual.code == 0, actual.err
    assert all(name in actual.out for name in (*PRESETS, "lm_eval/piqa", "lm_eval/nq_cloze_twice", "lm_eval/NAME"))
    assert "data: piqa.jsonl (baber/piqa, validation)" in actual.out


def test_what_lm_eval_lacks_is_said() -> None:
    assert not set(MISSING) & {task for task, _ in METRICS}
    assert all(name in PRESETS["statex/table3"].measures for name in MISSING)


def test_a_whole_preset_says_first_what_is_missing(tmp_path: Path) -> None:
    for task in tasks_of(["gated_deltanet/table3"], Options(data=str(tmp_path))):
        with pytest.raises(UserError, match=re.escape(f"there is no {tmp_path}/")):
            task.cells(Answering())
