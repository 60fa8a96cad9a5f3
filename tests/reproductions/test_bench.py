"""`reproductions/bench.py`: what is measured is right first, and what is written down is sane."""

import json
from pathlib import Path

import pytest

from reproductions import bench
from zoo.performance import model as models

SMALL = ("--model.vocab_size=32", "--model.num_layers=2", "--model.hidden_size=16", "--model.num_heads=2")
PLAIN = [item.removeprefix("--") for item in SMALL]


def record(folder: Path) -> dict:
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.slow
def test_expansion_beside_the_same_model(desk: Path):
    options = [*SMALL, "--factors=[1,2]", "--batch_size=1", "--length=20", "--steps=2", "--folder=found"]
    assert bench.main(["expansion", "--config", "gated_deltanet.yaml", *options]) == 0
    rows = record(desk / "found")["rows"]
    assert [(row["factor"], row["form"]) for row in rows] == [(1, ""), (2, "subheads"), (2, "long head"), (1, "")]
    assert [row["state_size"] for row in rows] == [256, 512, 512, 256]
    assert all(row["gate"]["passed"] and row["tflops"] > 0 for row in rows)
    speeds = [row["tokens_per_second"] for row in rows]
    assert rows[1]["of_one"] == pytest.approx(speeds[1] / ((speeds[0] + speeds[3]) / 2))
    assert rows[1]["of_long_head"] == pytest.approx(speeds[1] / speeds[2])
    assert (desk / "found/bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["expansion", "length"])
def test_captured_steps(desk: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    sizes = ["--factors=[2]", "--long_head=false", "--batch_size=1", "--length=64"]
    sizes = sizes if kind == "expansion" else ["--lengths=[64]", "--tokens=64"]
    options = [*SMALL, *sizes, "--steps=2", "--cuda_graph=true", "--folder=found"]
    assert bench.main([kind, "--config", "gated_deltanet.yaml", *options]) == 0
    rows = record(desk / "found")["rows"]
    assert len(rows) == (3 if kind == "expansion" else 1)
    assert all(row["not_captured"] is None and row["tokens_per_second"] > 0 for row in rows)
    assert ", captured" in capsys.readouterr().out


@pytest.mark.slow
def test_length_at_the_same_tokens_in_a_step(desk: Path, capsys: pytest.CaptureFixture[str]):
    options = [*SMALL, "--lengths=[40,20,8]", "--tokens=40", "--steps=2", "--folder=found"]
    assert bench.main(["length", "--config", "gated_deltanet.yaml", *options]) == 0
    rows = record(desk / "found")["rows"]
    assert [(row["length"], row["batch_size"]) for row in rows] == [(8, 5), (20, 2), (40, 1)]
    assert all(row["model"] == "gated_deltanet" and row["gate"]["passed"] and row["tflops"] > 0 for row in rows)
    assert all(row["tokens_per_second"] == pytest.approx(40e3 / row["step_ms"]) for row in rows)
    assert "40 tokens in each step" in capsys.readouterr().out
    assert (desk / "found/bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_has_no_speed(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(models.FP32, "cpu", 0.0)
    report = bench.bench_length(["gated_deltanet.yaml", *PLAIN], lengths=[8, 16], tokens=16, folder=str(tmp_path))
    assert report.failed
    assert [row["length"] for row in report.rows] == [8, 16]
    assert all("step_ms" not in row and row["note"] for row in report.rows)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0.4b", "1.3b"])
@pytest.mark.parametrize("mixer", bench.OVER_LENGTH)
def test_models_over_length_have_configs(mixer: str, size: str):
    base, overlay = bench.OVER_LENGTH[mixer]
    parsed = models.read([*base, f"gated_delta_networks/{overlay}-{size}.yaml"])
    assert parsed.model.vocab_size == 32000
