"""From the YAML of a sweep to its runs."""

from typing import Any

import pytest

from kernels import UserError
from zoo.experiments import Gate, Run, Sweep
from zoo.experiments.commands import read_sweep

FACTOR = "model.stack.mixer.factor"
QK = "model.stack.mixer.mixer.qk.activation"


def names(**arguments: Any) -> list[str]:
    return [run.name for run in Sweep("gated_deltanet.yaml", **arguments).runs()]


@pytest.mark.slow
def test_all_combinations_are_named_by_what_differs():
    assert names(axes={FACTOR: [1, 2], QK: ["silu", "relu"]}) == [
        "factor=1,activation=silu,seed=0",
        "factor=1,activation=relu,seed=0",
        "factor=2,activation=silu,seed=0",
        "factor=2,activation=relu,seed=0",
    ]


@pytest.mark.slow
def test_more_values_leave_the_names_of_the_others():
    """So that a sweep can grow without running anything again."""
    few = names(axes={FACTOR: [2]}, seeds=[0], learning_rates=[1e-2])
    many = names(axes={FACTOR: [2, 4]}, seeds=[0, 1], learning_rates=[1e-2, 3e-3])
    assert few == ["factor=2,lr=0.01,seed=0"]
    assert len(many) == 8
    assert few[0] in many


@pytest.mark.slow
def test_keys_with_the_same_end_are_told_apart():
    axes = {"model.stack.second.factor": [1, 2], "model.stack.first.factor": [1, 2]}
    runs = Sweep("gdn_h2.yaml", axes=axes).runs()
    assert runs[1].name == "second.factor=1,first.factor=2,seed=0"


@pytest.mark.slow
def test_values_reach_the_config():
    run = Sweep("gated_deltanet.yaml", axes={FACTOR: [1, 8]}, seeds=[3], learning_rates=[0.02]).runs()[1]
    config = run.read()
    assert config.model.stack.init_args.mixer.init_args.factor == 8
    assert (config.seed_everything, config.optim.learning_rate) == (3, 0.02)
    assert run == Run("factor=8,lr=0.02,seed=3", run.sources, ((FACTOR, "8"),), 0.02, 3, run.parsed)


@pytest.mark.slow
def test_overlays_by_label_file_and_inline():
    axes = {
        "variant": {
            "plain": None,
            "file": "ablate/expand_4.yaml",
            "inline": {"model": {"num_heads": 1}},
            "several": ["ablate/expand_4.yaml", {"model": {"num_heads": 1}}, "model.num_layers=2"],
        }
    }
    runs = Sweep("gated_deltanet.yaml", axes=axes).runs()
    assert [run.name for run in runs] == [
        "variant=plain,seed=0",
        "variant=file,seed=0",
        "variant=inline,seed=0",
        "variant=several,seed=0",
    ]
    actual = [run.read().model for run in runs]
    assert [m.stack.init_args.mixer.init_args.factor for m in actual] == [1, 4, 1, 4]
    assert [m.num_heads for m in actual] == [3, 3, 1, 1]
    assert [m.num_layers for m in actual] == [6, 6, 6, 2]


def test_a_list_of_files_is_labelled_by_their_names():
    assert names(axes={"expansion": ["ablate/expand_2.yaml", "ablate/expand_4.yaml"]}) == [
        "expansion=expand_2,seed=0",
        "expansion=expand_4,seed=0",
    ]


@pytest.mark.slow
def test_a_control_that_is_null_is_the_base():
    plan = read_sweep([{"base": "gla.yaml", "axes": {"model.num_layers": [3]}, "controls": {"x": None}}])
    run, control = plan.runs()
    assert (run.name, control.name) == ("num_layers=3,seed=0", "control=x,seed=0")
    assert control.read() == Sweep("gla.yaml").runs()[0].read()


@pytest.mark.slow
def test_controls_stand_outside_the_grid():
    arguments = {
        "axes": {FACTOR: [1, 2]},
        "controls": {"wide": {"model": {"num_heads": 1}}, "deep": "state_expansion/l.yaml"},
    }
    runs = Sweep("gated_deltanet.yaml", seeds=[0, 1], **arguments).runs()
    assert [run.name for run in runs if run.seed == 0] == [
        "factor=1,seed=0",
        "factor=2,seed=0",
        "control=wide,seed=0",
        "control=deep,seed=0",
    ]
    assert runs[-1].cell == (("control", "deep"),)
    assert (runs[-3].read().model.num_heads, runs[-1].read().model.num_layers) == (1, 28)


@pytest.mark.slow
def test_null_and_lists_are_values():
    runs = Sweep("gated_deltanet.yaml", axes={"model.stack.mixer.mixer.decay": [None, "Discretisation"]}).runs()
    assert runs[0].name == "decay=null,seed=0"
    assert runs[0].read().model.stack.init_args.mixer.init_args.mixer.init_args.decay is None


def test_the_base_may_have_overlays_and_overrides_come_last():
    base = ["gated_deltanet.yaml", "size/400m.yaml", {"model": {"num_layers": 3}}, "trainer.max_steps=7"]
    (run,) = Sweep(base).runs(("trainer.max_steps=9",))
    config = run.read()
    assert (config.model.hidden_size, config.model.num_layers, config.trainer.max_steps) == (1024, 3, 9)
    assert run.arguments()[-1] == "--trainer.max_steps=9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": {"model.stack.mixer.factr": [1]}}, "did you mean 'factor'"),
        (
            {"axes": {"modle.num_heads": [1]}},
            r"axes.modle.num_heads: is neither a key of a config; did you mean 'model'",
        ),
        ({"axes": {FACTOR: ["many"]}}, "factor"),
        ({"axes": {FACTOR: []}}, "axes.model.stack.mixer.factor: has no values"),
        ({"axes": {"optim.learning_rate": [1, 0.5, 1.0]}}, "axes.optim.learning_rate: 1 is listed twice"),
        ({"axes": {FACTOR: [1, 2, 1]}}, r"axes.model.stack.mixer.factor: 1 is listed twice"),
        ({"axes": {FACTOR: 3}}, "is neither a list of values nor a mapping"),
        ({"axes": {"kind": {"a": "ablate/expand_5.yaml"}}}, "did you mean 'ablate/expand_"),
        ({"axes": {"kind": {"a": 3}}}, "axes.kind.a: 3 is neither a file"),
        ({"controls": {"a": 3}}, "controls.a: 3 is neither a file"),
        ({"metric": "val_los"}, "metric: 'val_los' is not a number in results.json; did you mean 'val_loss'"),
        ({"x": "state"}, "x: 'state' is not a number in results.json"),
        ({"seeds": []}, "seeds: the list is empty"),
        ({"seeds": [1, 1]}, "seeds: .* has a value twice"),
        ({"learning_rates": [0.1, 0.1]}, "learning_rates: .* has a value twice"),
        ({"learning_rates": [-1.0]}, "learning_rate"),
        ({"axes": {"trainer.max_steps": [5, 0]}}, "trainer.max_steps: 0 leaves nothing to train; it must be at least"),
        ({"base": ["gla.yaml", "trainer.min_steps=9", "trainer.max_steps=3"]}, "trainer.min_steps: 9 is above"),
        ({"axes": {"kind": {"a b": None, "a/b": "ablate/expand_4.yaml"}}}, "two values have the same name"),
        ({"axes": {"kind": {"a": None, "b": {}}}}, "axes: kind: a and kind: b have the same config"),
        ({"axes": {"seed_everything": [0, 1]}}, "axes: seed_everything: 0 and seed_everything: 1 have the same config"),
        (
            {"axes": {"optim.learning_rate": [0.1, 0.2]}, "learning_rates": [1e-3]},
            r"axes: optim\.learning_rate: 0\.1 and optim\.learning_rate: 0\.2 have the same config",
        ),
        ({"axes": {FACTOR: [1]}, "lines": ["factor"]}, "lines: 'factor' is not one of the axes"),
        ({"also": ["pairs_at_80"]}, "also: 'pairs_at_80' is not a number in results.json; did you mean 'pairs_at_"),
        ({"gates": [Gate(["val_accurcy"], 0.5)]}, "gates.numbers: .* did you mean 'val_accuracy'"),
        ({"gates": [Gate(["val_loss"], at_most=1.0, where={"control": "x"})]}, "gates.where: .* is not a cell of this"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Sweep(**{"base": "gated_deltanet.yaml"} | arguments).runs()


def test_overrides_of_what_the_runs_differ_in():
    with pytest.raises(UserError, match="seed_everything: the runs of a sweep differ in it; set seeds instead"):
        Sweep("gla.yaml", seeds=[0, 1]).runs(("seed_everything=5",))
    with pytest.raises(UserError, match=r"optim\.learning_rate: the runs of a sweep differ in it; set learning_rates"):
        Sweep("gla.yaml", learning_rates=[1e-3]).runs(("optim.learning_rate=0.1",))
    assert len(Sweep("gla.yaml").runs(("optim.learning_rate=0.1",))) == 1


def test_a_gate_without_numbers_or_bounds():
    with pytest.raises(UserError, match=r"gates\.numbers: the list is empty"):
        Gate([], 0.5)
    with pytest.raises(UserError, match="gates: val_loss has no bound; give at_least or at_most"):
        Gate(["val_loss"])


def test_a_base_that_does_not_exist():
    with pytest.raises(UserError, match=r"did you mean 'gla.yaml'"):
        Sweep("gal.yaml").runs()


def test_names_of_axes_are_names_of_folders():
    axes = {"q/k size": {"small": None}, "../../x": {"a/b": None}, "": {"..": None}}
    (run,) = Sweep("gated_deltanet.yaml", axes=axes).runs()
    assert run.name == "q-k-size=small,x=a-b,none=..,seed=0"
