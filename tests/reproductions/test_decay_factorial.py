"""The factorial of decays: its mixers keep the contract and start alike, and its effects are those of the rows."""

import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

import mixers
from reproductions import main_effects
from reproductions.decay_factorial import DecayPerChannel, DecayPerHead
from reproductions.write_csv import write
from zoo.config import from_config
from zoo.config.overlays import load_items
from zoo.experiments.commands import read_sweep

SIZES = {"head_dim": 16, "value_dim": 32, "low": 1.0, "high": 16.0}


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [DecayPerHead, DecayPerChannel])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("bounded", [True, False])
def test_the_mixers_keep_the_contract(mixer: type[DecayPerHead], delta: bool, bounded: bool):
    mixers.check_mixer(partial(mixer, delta=delta, bounded=bounded, **SIZES))


@pytest.mark.parametrize("mixer", [DecayPerHead, DecayPerChannel])
def test_free_and_bounded_decays_start_alike(mixer: type[DecayPerHead]):
    starts = []
    for bounded in (False, True):
        torch.manual_seed(0)
        decay = mixer(mixers.Site(128, 4), delta=True, bounded=bounded, **SIZES).decay
        starts.append(decay(torch.zeros_like(decay.bias)))
    torch.testing.assert_close(starts[0], starts[1], rtol=1e-4, atol=0)
    assert -1.6 <= starts[0].min() < starts[0].max() < 0


@pytest.mark.slow
def test_the_sweep_builds():
    """96 runs choose the rates, 80 are reported at one rate each; all states have one size."""
    runs = read_sweep(load_items(["reproductions/sweeps/decay_factorial.yaml"])).runs()
    assert (len(runs), len({run.cell for run in runs})) == (16 * 3 * 7, 16)
    configs = {run.cell: run.parsed for run in runs}
    for config in configs.values():
        config.model.vocab_size = 1024
    assert {from_config(config, device="meta").state_size() for config in configs.values()} == {2 * 4 * 16 * 32}


@pytest.mark.nightly
def test_the_states_of_the_sweep_over_mixers_are_equal():
    runs = read_sweep(load_items(["reproductions/sweeps/equal_states.yaml"])).runs()
    for factor, size in (("1", 8192), ("4", 32768)):
        configs = {run.cell: run.parsed for run in runs if ("model.stack.mixer.factor", factor) in run.cell}
        assert len(configs) == 17
        for cell, config in configs.items():
            config.model.vocab_size = 1024
            assert from_config(config, device="meta").state_size() == pytest.approx(size, rel=0.08), cell


def test_main_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Channels bring 0.1 with the delta rule and 0.3 without, ± 0.02 by seed; the sum costs 0.5 with heads."""
    rows = []
    for seed, (decay, rule) in product((2, 3, 4), product(("head", "channel"), ("delta", "sum"))):
        gain = (0.1 if rule == "delta" else 0.3) + 0.02 * (seed - 3) if decay == "channel" else 0
        value = 0.6 + gain - (0.5 if rule == "sum" else 0)
        rows.append({"cell": f"{decay}, {rule}", "seed": seed, "val_accuracy": value})
    rows += [{"cell": "head, delta", "seed": 0, "val_accuracy": 0}] * 2  # a seed on which rates were chosen
    write(rows, tmp_path / "rows.csv")
    monkeypatch.setattr(sys, "argv", ["main_effects.py", str(tmp_path / "rows.csv")])
    main_effects.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    half = 4.303 * 0.02 / 3**0.5
    assert lines == [
        "val_accuracy, seeds 2, 3, 4",
        f"channel − head +0.200 ± {half:.3f}",
        f"channel − head, in delta +0.100 ± {half:.3f}",
        f"channel − head, in sum +0.300 ± {half:.3f}",
        "sum − delta -0.400 ± 0.000",
        "sum − delta, in head -0.500 ± 0.000",
        "sum − delta, in channel -0.300 ± 0.000",
    ]
    controlled = [*rows, *({"cell": "attention", "seed": s, "val_accuracy": 0.7 - s / 100} for s in (2, 3, 4))]
    write(controlled, tmp_path / "controlled.csv")
    monkeypatch.setattr(sys, "argv", ["main_effects.py", str(tmp_path / "controlled.csv")])
    main_effects.main()
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == lines
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--reference=attention"])
    main_effects.main()
    of_control = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    half = 4.303 * 0.01 / 3**0.5
    assert of_control[1:3] == ["attention 0.670", f"head, delta − attention -0.070 ± {half:.3f}"]
    assert len(of_control) == 2 + 4
    longer = [row | {"length": length, "val_accuracy": row["val_accuracy"] / 2} for row in rows for length in (1, 2)]
    write(longer, tmp_path / "long.csv")
    options = ["--across=length", "--reference=channel", "--where=length=2", "--seeds=2"]
    options.append(f"--picture={tmp_path / 'curves.png'}")
    monkeypatch.setattr(sys, "argv", ["main_effects.py", str(tmp_path / "long.csv"), *options])
    main_effects.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert (tmp_path / "curves.png").stat().st_size
    assert lines[:3] == ["length 2: val_accuracy, seeds 2", "channel 0.265", "head − channel -0.090, one seed"]


def test_one_cell_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Differences are formed within a seed and a rate; a run without its pair does not count."""
    gains = {("0.01", 0): 0.1, ("0.003", 0): 0.3, ("0.01", 1): 0.4}
    rows = [{"cell": "a, b", "learning_rate": "0.003", "seed": 1, "val_accuracy": 0.9}]  # without its pair
    for (rate, seed), gain in gains.items():
        for cell, value in (("a, b", 0.2), ("c", 0.2 + gain)):
            rows.append({"cell": cell, "learning_rate": rate, "seed": seed, "val_accuracy": value + seed})
    write(rows, tmp_path / "rows.csv")
    command = ["main_effects.py", str(tmp_path / "rows.csv"), "--beside"]
    monkeypatch.setattr(sys, "argv", [*command, "a, b"])
    main_effects.main()
    half = 12.706 * 0.1
    assert capsys.readouterr().out.split() == ["val_accuracy", *f"c − a, b +0.300 ± {half:.3f}".split(), *(
        ["(the", "interval", "contains", "0)"]
    )]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*command, "a, b", "--gate", "val_accuracy=1"])  # of seed 1 alone
    main_effects.main()
    assert "c − a, b +0.400, one seed" in " ".join(capsys.readouterr().out.split())
