"""`scaling plan`: what a budget pays for, as a sweep that runs as it is."""

from pathlib import Path

import pytest
import yaml

import zoo
from zoo.config.overlays import load_config
from zoo.experiments import Sweep
from zoo.files.sealed_json import write_sealed

LAW = ("coefficient", "exponent")
PLAN = ("scaling", "plan", "--mixers=gla", "--sizes=4")


@pytest.mark.slow
def test_a_ladder_is_a_sweep(command, desk: Path) -> None:
    done = command(*PLAN, "--budget=3e17", "--peak=1e15", "--output=ladder/").ok()
    for word in ("6·N·D", "each run sees", "hours of one device", "chinchilla", "sweep --config ladder/sweep.yaml"):
        assert word in done.out
    runs = Sweep(**load_config("ladder/sweep.yaml")).runs()
    assert len(runs) == 4
    configs = [run.read() for run in runs]
    assert {config.optim.schedule for config in configs} == {"constant"}
    assert len({config.trainer.max_steps for config in configs}) == 1
    rates = {config.model.hidden_size: config.optim.learning_rate for config in configs}
    assert sorted(rates.values(), reverse=True) == [rates[hidden] for hidden in sorted(rates)]
    checks = Sweep(**load_config("ladder/check_learning_rate.yaml")).runs()
    assert len(checks) == 4
    for check in checks:
        config = check.read()
        assert config.model.hidden_size in (min(rates), max(rates))
        assert config.optim.learning_rate / rates[config.model.hidden_size] in (0.5, 2.0)


@pytest.mark.slow
def test_the_whole_budget_is_spent_on_true_counts(desk: Path) -> None:
    made = zoo.scaling.plan(["gla", "transformer"], budget=3e17, sizes=4, verbose=False)
    assert made.flops == pytest.approx(3e17, rel=0.01)
    assert made.flops <= 3e17
    sizes = [rung.without_embeddings for rung in made.rungs]
    assert max(sizes) > 10 * min(sizes)
    rung, overlay = made.rungs[0], made.rungs[0].shape
    settings = [f"model.{name}={value}" for name, value in overlay._asdict().items()]
    model = zoo.build("gla.yaml", *settings, "model.vocab_size=1024", device="meta")
    assert rung.parameters == model.num_parameters()
    assert rung.without_embeddings == rung.parameters - 2 * 1024 * overlay.hidden_size
    assert rung.flops == pytest.approx(3 * model.flops(1024) / 1024 * made.tokens)
    assert 6 * made.best_size * made.best_tokens == pytest.approx(3e17)


@pytest.mark.slow
def test_hours_are_a_budget_and_other_laws_plan(desk: Path) -> None:
    law = {"loss": (50.0, -0.07), "size": (0.1, 0.5), "tokens": (5 / 3, 0.5)}
    row = {f"{part}_{name}": value for part, pair in law.items() for name, value in zip(LAW, pair, strict=True)}
    write_sealed("laws.json", {"laws": [row]})
    options = {"sizes": 4, "mfu": 0.5, "peak": 1e15, "gpu_hours": 0.2, "verbose": False}
    made = zoo.scaling.plan("gla", law="laws.json", overlays="data.sequence_length=512", **options)
    assert made.hours == pytest.approx(0.2, rel=0.01)
    assert made.best_size == pytest.approx(0.1 * 3.6e17**0.5)
    assert (
        yaml.safe_load(Path("ladder/sweep.yaml").read_text())["axes"]["mixer"]["gla"][-1] == "data.sequence_length=512"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mixers=glaa", "--budget=1e18"], "did you mean 'gla"),
        (["--mixers=gla,gla", "--budget=1e18"], "mixers: 'gla,gla' must name configs, each name once"),
        (["--budget=1e12"], "do not pay for 5 sizes; the smallest ladder needs about"),
        (["--budget=1e18", "--gpu_hours=3"], "give one of budget and gpu_hours; both are given"),
        ([], "give one of budget and gpu_hours; none is given"),
        (["--gpu-hurs=1"], "gpu_hurs: unknown key; did you mean 'gpu_hours'"),
        (["--budget=1e30"], "are far more than the largest ladder takes, which ends at 8192 channels"),
        (["--mixers=gla,gla.yaml", "--budget=1e18"], "must name configs, each name once"),
        (["--budget=-1"], "budget: -1.0 must be above 0"),
        (["--gpu_hours=3", "--mfu=40", "--peak=1e15"], "mfu: 40.0 must be above 0 and at most 1"),
        (["--budget=1e18", "--sizes=3"], "sizes: 3 must be at least 4"),
        (["--budget=1e18", "--sizes=200"], "and at most 20"),
        (["--budget=1e18", "--law=chinchila"], "did you mean 'chinchilla'"),
        (["--budget=1e17", "--batch_size=100000"], "pay for 2 steps of 102,400,000 tokens"),
        (["--budget=1e18", "--output=."], "output: . exists; name a new folder"),
        (["--budget=1e18", "--overlays=optim.learning_rat=1"], "did you mean 'learning_rate'"),
    ],
)
def test_a_mistake_is_one_sentence(command, arguments: list[str], expected: str) -> None:
    inputs = arguments if any("mixers" in argument for argument in arguments) else ["--mixers=gla", *arguments]
    assert expected in command("scaling", "plan", *inputs).sentence()
    assert not Path("ladder").exists()


def test_a_law_is_a_laws_json(desk: Path) -> None:
    options = {"budget": 1e18, "law": "results.json"}
    Path("results.json").write_text("{}")
    with pytest.raises(zoo.UserError, match=r"^law: results.json is damaged \(it has lost .*name a laws.json that"):
        zoo.scaling.plan("gla", **options)
    write_sealed("results.json", {"status": "finished"})
    with pytest.raises(zoo.UserError, match=r"^law: results.json is not a laws.json of scaling fit"):
        zoo.scaling.plan("gla", **options)


def test_without_a_gpu_hours_need_a_peak(command, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "gpu_hours: needs the device's peak" in command("scaling", "plan", "--mixers=gla", "--gpu-hours=3").err


@pytest.mark.slow
def test_the_sweep_lists_its_runs_and_goes_where_fit_looks(command, desk: Path) -> None:
    assert command(*PLAN, "--budget=3e17").code == 0
    shown = command("sweep", "--config", "ladder/sweep.yaml", "--dry-run").ok()
    assert "runs go to ladder/NAME" in " ".join(shown.out.split())
