"""`scaling fit` at the command line: which runs are used, what is said about the others, what is written."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo
from kernels import UserError
from tests.zoo.scaling.curves import write_run
from zoo.files.sealed_json import write_sealed
from zoo.scaling.law import crossing
from zoo.scaling.parametric import CHINCHILLA

pytest.importorskip("scipy")
SIZES = np.geomspace(1e8, 1e10, 6)


@pytest.fixture
def ladder(desk: Path) -> Path:
    for i, size in enumerate(SIZES):
        write_run(desk / "ladder" / f"run{i}", size)
    return desk / "ladder"


@pytest.mark.slow
def test_a_law_and_its_table(command, ladder: Path) -> None:
    done = command("scaling", "fit", "ladder/", "--method=parametric", "--draws=8", "--output=law/").ok()
    for word in ("N_opt(C)", "D_opt(C)", "PF-days", "law/laws.json"):
        assert word in done.out
    law = json.loads(Path("law/laws.json").read_text())["laws"][0]
    expected = CHINCHILLA.laws(6.0)
    assert law["size_exponent"] == pytest.approx(expected.size.exponent, abs=0.005)
    low, high = law["size_exponent_interval"]
    assert low <= law["size_exponent"] <= high
    assert law["parametric"]["alpha"] == pytest.approx(CHINCHILLA.alpha, abs=0.01)


def test_a_file_of_somebody_else_is_kept(ladder: Path) -> None:
    Path("law").mkdir()
    Path("law/laws.json").write_text('{"laws": "of nature"}')
    with pytest.raises(UserError, match=r"law/laws\.json is damaged .*; delete it, or choose another output"):
        zoo.scaling.fit(ladder, output="law", draws=0, verbose=False)
    assert Path("law/laws.json").read_text() == '{"laws": "of nature"}'


@pytest.mark.slow
def test_several_places_and_mixers_that_cross(command, ladder: Path) -> None:
    for i, size in enumerate(SIZES):
        write_run(ladder.parent / "more" / f"run{i}", size, law=CHINCHILLA._replace(E=1.6, A=600.0), mixers="Other×2")
    done = command("scaling", "fit", "ladder", "more", "--draws=4", "--method=parametric").ok()
    assert "left out" not in done.out  # runs of the same name in two places are two runs
    written = json.loads((ladder / "law" / "laws.json").read_text())
    assert len(written["laws"]) == 2
    (pair,) = written["crossings"]
    assert pair["mixers"] == ["M", "Other×2"]  # it starts higher, and has the lower limit
    laws = [CHINCHILLA.laws(6.0), CHINCHILLA._replace(E=1.6, A=600.0).laws(6.0)]
    assert pair["flops"] == pytest.approx(crossing(*laws, pair["between"]), rel=0.2)
    low, high = pair["flops_interval"]
    assert low <= pair["flops"] <= high
    assert pair["crossed"] == 1
    (line,) = [line for line in done.out.splitlines() if line.split()[:2] == ["M", "Other×2"]]
    assert f"{pair['flops']:.2g}" in line
    assert f"{low:.2g} to {high:.2g}" in line


def test_mixers_that_cannot_be_told_apart(command, desk: Path) -> None:
    generator = np.random.default_rng(0)
    for mixer in ("M", "Twin"):
        for i, size in enumerate(SIZES):
            noisy = CHINCHILLA._replace(E=CHINCHILLA.E * np.exp(0.01 * generator.standard_normal()))
            write_run(desk / mixer / f"run{i}", size, law=noisy, mixers=mixer)
    done = command("scaling", "fit", "M", "Twin", "--draws=8", "--method=parametric").ok()
    written = json.loads(Path("M/law/laws.json").read_text())
    low, high = written["crossings"][0]["difference"]
    assert low < 0 < high
    (said,) = [remark for remark in written["remarks"] if "cannot be told apart" in remark]
    assert f"{low:.3f} to {high:.3f} nats" in said
    assert "cannot be told apart" in done.out


def test_what_a_ladder_lacks_is_named(command, ladder: Path) -> None:
    done = command("scaling", "fit", "ladder", "--draws=0", "--method=parametric")
    assert "M: one learning rate alone was tried at the smallest and the largest size" in " ".join(done.out.split())
    write_sealed(ladder / "runs.json", {"run0": {}, "run9": {}})
    write_run(ladder / "rate", SIZES[0], learning_rate=1e-5)
    done = command("scaling", "fit", "ladder", "--draws=0", "--method=parametric")
    said = " ".join(done.out.split())
    assert "left out ladder/run9: its sweep has not begun it" in said
    assert "left out ladder/run0: its sweep" not in said
    assert "M: one learning rate alone was tried at the largest size" in said


def test_mixers_that_do_not_cross(command, ladder: Path) -> None:
    for i, size in enumerate(SIZES):
        write_run(ladder.parent / "more" / f"run{i}", size, law=CHINCHILLA._replace(E=2.0), mixers="Worse")
    done = command("scaling", "fit", "ladder", "more", "--draws=0", "--method=parametric").ok()
    (pair,) = json.loads((ladder / "law" / "laws.json").read_text())["crossings"]
    assert (pair["mixers"], pair["flops"], pair["flops_interval"]) == (["M", "Worse"], None, None)
    assert re.search(r"\bM +never Worse +do not cross", done.out)
    assert "told apart" not in done.out


def test_from_python(ladder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = zoo.scaling.fit([ladder], method="parametric", draws=0, verbose=False, flops="6n")
    assert (rows[0]["counting"], rows[0]["size_exponent_interval"]) == ("6n", None)
    assert not capsys.readouterr().out


def test_each_rule_names_the_run_and_the_reason(command, ladder: Path) -> None:
    size = float(SIZES[0])
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "older": ({"mixers": None}, "its results.json has no mixers; it is not a run on tokens"),
        "custom": ({"schedule": "custom"}, "its schedule is a class (optim.schedule), which does not say where"),
        "cosine": ({"schedule": "cosine"}, "its learning rate falls all the time (schedule: cosine)"),
        "half": ({"status": "interrupted"}, "its status is interrupted"),
        "same": ({}, "it repeats"),
        "worse": (
            {"learning_rate": 2e-3, "law": CHINCHILLA._replace(E=2.0)},
            "with the learning rate 0.001, has a low",
        ),
        "short": ({"decay_starts": 9}, "it has 7 training losses after its warm-up and before its decay, fewer than 8"),
        "corpus": ({"seed": 1, "data_hash": "xyz"}, "it was trained on other data (xyz) than"),
        "longer": ({"seed": 2, "context_length": 4096}, "it was trained on sequences of another length (4096) than"),
    }
    for name, (row, _) in bad.items():
        write_run(ladder / name, size, **row)
    nan, up = write_run(ladder / "nan", size, seed=3), write_run(ladder / "up", size, seed=4)
    rows = (nan / "metrics.jsonl").read_text().splitlines()
    (nan / "metrics.jsonl").write_text("\n".join([*rows[:30], '{"step": 30, "tokens": 9, "train_loss": null}']))
    rows = (up / "metrics.jsonl").read_text().splitlines()
    late = [json.dumps(json.loads(row) | {"train_loss": 9.0}) for row in rows[50:]]
    (up / "metrics.jsonl").write_text("\n".join([*rows[:50], *late]))
    killed, damaged = write_run(ladder / "killed", size), write_run(ladder / "damaged", size)
    (killed / "results.json").unlink()
    (damaged / "results.json").write_text("{")
    done = command("scaling", "fit", "ladder", "--draws=0", "--method=parametric").ok()
    said = " ".join(done.out.split())
    reasons = {name: reason for name, (_, reason) in bad.items()} | {
        "nan": "it has diverged: its loss at step 30 is not a number",
        "up": "it has diverged: its loss ends at 9.00",
        "killed": "it has no results.json, so it has not ended",
        "damaged": "is damaged",
    }
    left_out = json.loads((ladder / "law" / "laws.json").read_text())["left_out"]
    assert left_out.keys() == {f"ladder/{name}" for name in reasons}
    for name, reason in reasons.items():
        assert reason in left_out[f"ladder/{name}"]
        assert f"left out ladder/{name}: " in said


def test_variants_of_one_mixer_are_not_taken_for_sizes_of_it(command, ladder: Path) -> None:
    for i, size in enumerate(SIZES):
        folder = write_run(ladder / f"no_decay{i}", size, law=CHINCHILLA._replace(E=2.0))
        (folder / "config.yaml").write_text(f"model: {{hidden_size: {i}, stack: {{decay: none}}}}")
    done = command("scaling", "fit", "ladder", "--draws=0", "--method=parametric").ok()
    said = " ".join(done.out.split())
    assert "left out" not in said  # neither repeats the other
    assert (
        "M: models that differ in more than their size are in one law, such as ladder/no_decay0 and ladder/run0" in said
    )
    done = command("scaling", "fit", *(f"ladder/no_decay{i}" for i in range(6)), "--draws=0", "--method=parametric")
    assert "differ in more than their size" not in done.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "runs: there is no folder nowhere"),
        (["."], "is not a run and holds none (a run has a metrics.jsonl)"),
        ([], "runs: missing"),
        (["ladder", "--method=isoflp"], "method: 'isoflp' is not one of envelope, isoflop, parametric"),
        (["ladder", "--flops=7n"], "flops: '7n' is not one of model, 6n"),
        (["ladder", "--draws=-1"], "draws: -1 must be at least 0"),
        (["ladder", "--seed=-1"], "seed: -1 must be at least 0"),
        (["ladder", "--metod=envelope"], "did you mean 'method'"),
        (["ladder/run0"], "M: it cannot be fitted, because 1 size of model was trained; 4 are needed"),
        ([f"ladder/run{i}" for i in range(3)], "because 3 sizes of model were trained; 4 are needed"),
    ],
)
def test_a_mistake_is_one_sentence(command, ladder: Path, arguments: list[str], expected: str) -> None:
    assert expected in command("scaling", "fit", *arguments).sentence()


def test_without_scipy_one_sentence_says_what_to_install(command, ladder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    failed = command("scaling", "fit", "ladder")
    assert failed.err == "error: scaling fit: needs scipy; pip install 'token-mixer-zoo[scaling]'\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["scaling"], "plan|fit"), (["scaling", "--help"], "plan|fit"), (["scaling", "fit", "--help"], "--method")],
)
def test_help(command, arguments: list[str], expected: str) -> None:
    done = command(*arguments).ok()
    assert expected in done.out


def test_an_unknown_part(command) -> None:
    assert "scaling: 'fitt' is not one of plan, fit; did you mean 'fit'" in command("scaling", "fitt").err
