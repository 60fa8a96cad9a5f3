"""Every sweep in configs/: its runs can be built, and there are enough seeds behind each number."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace

from zoo import config as configs
from zoo.config.overlays import load_config
from zoo.experiments import Sweep
from zoo.experiments.commands import read_sweep
from zoo.experiments.definition import Run
from zoo.lm.size_table import parameters_without_embeddings
from zoo.scaling.runs import find_runs, read_run_table, select

from .command_lines import check_parses, with_tokenizer
from .commands import ROOT, Command
from .shipped_configs import SWEEPS, commands, header


def sweep_of(name: str, **replaced: Any) -> Sweep:
    """A sweep of configs/, some of whose keys are replaced."""
    return read_sweep([load_config(name) | replaced])


def unchecked_runs(name: str) -> list[Run]:
    """All runs of a sweep, without reading their configs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "read", lambda run: None)
        patch.setattr(Run, "check", lambda run: Namespace(sources=run.sources, optim=Namespace()))
        return sweep_of(name).runs()


def checked_runs(name: str) -> list[Run]:
    """The runs of a sweep in which at most one axis has another value than its first, each of which is built.

    They hold all values of all axes, and all controls.
    """
    axes = load_config(name)["axes"]
    runs = sweep_of(name, gates=[], axes={axis: _part(values, 0, 1) for axis, values in axes.items()}).runs()
    for varied in axes:
        if len(axes[varied]) > 1:
            star = {
                axis: _part(values, 1, None) if axis == varied else _part(values, 0, 1) for axis, values in axes.items()
            }
            # the first call has checked the learning rates, one more config each
            runs += sweep_of(name, gates=[], controls={}, learning_rates=[], axes=star).runs()
    return runs


def _part(values: Any, start: int, stop: int | None) -> Any:
    """Some values of an axis, which is a list or a mapping."""
    return dict([*values.items()][start:stop]) if isinstance(values, dict) else values[start:stop]


def sweep_command(name: str) -> list[str]:
    (line,) = [line.removeprefix("#   ") for line in header(name) if "cli.py sweep" in line]
    return shlex.split(line)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_the_runs_of_a_sweep_build(name: str):
    assert {value for run in checked_runs(name) for value in run.cell} == {
        value for run in unchecked_runs(name) for value in run.cell
    }


def test_sweeps_of_state_tracking_have_one_protocol():
    delta, newer = (load_config(f"sweep/state_tracking{name}.yaml") for name in ("", "_newer"))
    models = [sweep["axes"].pop("model") for sweep in (delta, newer)]
    assert delta == newer
    reference = "Gated DeltaNet, β to 2"
    assert models[0][reference] == models[1][reference]


@pytest.mark.parametrize("name", SWEEPS)
def test_at_least_three_seeds_are_behind_each_number(name: str):
    names = [run.name for run in unchecked_runs(name)]
    seeds = load_config(name)["seeds"]
    assert len(seeds) >= 3
    assert sum(run.endswith("seed=0") for run in names) * len(seeds) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_the_command_of_a_sweep_parses(name: str, command: Command, finished: Path, desk: Path, tmp_path: Path):
    check_parses(sweep_command(name), command, finished, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SWEEPS)
def test_all_runs_of_a_sweep_build(name: str, command: Command, finished: Path):
    arguments = sweep_command(name)
    shown = command(*arguments, *with_tokenizer(arguments, finished), "--dry-run").ok()
    assert shown.out.count("seed=0") * len(load_config(name)["seeds"]) == shown.out.count("seed=")


@pytest.fixture(params=["one axis at a time", pytest.param("all runs", marks=pytest.mark.nightly)])
def runs_of(request: pytest.FixtureRequest) -> Callable[[str], list[Run]]:
    """The runs of a sweep."""
    return checked_runs if request.param == "one axis at a time" else lambda name: sweep_of(name).runs()


@pytest.mark.slow
def test_the_miniature_of_scaling_laws(runs_of: Callable[[str], list[Run]]):
    """Six sizes over more than a decade of five mixers, which see the same 200M tokens at a constant learning rate."""
    (line,) = commands("scaling/miniature.yaml")
    assert "sweep --config scaling/miniature.yaml" in line
    sizes: dict[str, list[int]] = {}
    rates: dict[int, float] = {}
    for run in runs_of("scaling/miniature.yaml"):
        assert run.parsed is not None
        config = run.parsed.clone()
        data = config.data.init_args
        assert config.optim.schedule == "constant"
        assert config.trainer.max_steps * data.batch_size * data.sequence_length >= 200e6
        config.model.vocab_size = data.vocab_size
        size = parameters_without_embeddings(configs.from_config(config, device="meta"))
        assert config.optim.learning_rate == pytest.approx(3.239e-3 - 1.395e-4 * math.log(size), rel=0.05)
        sizes.setdefault(dict(run.cell)["mixer"], []).append(size)
        rate = rates.setdefault(config.model.hidden_size, config.optim.learning_rate)
        assert rate == config.optim.learning_rate, "the rate is that of the size, for each mixer"
    assert len(sizes) == 5
    assert max(len(of_mixer) for of_mixer in sizes.values()) == 6
    for of_mixer in sizes.values():
        assert 36e6 < max(of_mixer) < 44e6
        assert len(of_mixer) == 1 or 0.9e6 < min(of_mixer) < 1.2e6
    measured = select(find_runs([ROOT / "reproductions" / "measured" / "miniature.csv"]), {})
    assert {run.name.rpartition(": ")[2] for run in measured.runs} <= {
        run.name for run in unchecked_runs("scaling/miniature.yaml")
    }
    assert not measured.left_out
    checks: dict[tuple[str, int], list[float]] = {}
    for run in runs_of("scaling/miniature_rates.yaml"):
        assert run.parsed is not None
        config = run.parsed
        assert config.trainer.max_steps == 768
        size = config.model.hidden_size
        checks.setdefault((dict(run.cell)["mixer"], size), []).append(config.optim.learning_rate / rates[size])
    assert {size for _, size in checks} == {128, 640}
    assert {mixer for mixer, _ in checks} == {*sizes}
    assert max(len(ratios) for ratios in checks.values()) == 3
    assert all(ratios == pytest.approx([0.5, 2, 4][: len(ratios)]) for ratios in checks.values())
    names = {run.name for run in unchecked_runs("scaling/miniature_rates.yaml")}
    rates_measured = read_run_table(ROOT / "reproductions" / "measured" / "miniature_rates.csv")
    assert {curve.run.rpartition(": ")[2] for _, curve in rates_measured} <= names
    halves: dict[int, float] = {}
    for run in runs_of("scaling/miniature_twice.yaml"):
        assert run.parsed is not None
        config = run.parsed
        assert config.trainer.max_steps == 3072
        halves[config.model.hidden_size] = config.optim.learning_rate / 2
    assert halves == pytest.approx(rates)
