"""`reproductions/statex_budget.py`: the steps of StateX, each into rows, and nothing is trained twice."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from reproductions import main_effects, statex_budget
from reproductions.write_csv import read, write
from zoo.data.text.corpus import Corpus
from zoo.data.text.tokenizer import train_tokenizer


def test_mixers_and_seeds_without_all_rows_are_left(tmp_path: Path):
    cells = [("GLA", form) for form in statex_budget.FORMS] + [("Mamba2", "LPT")]
    rows = [{"cell": f"{mixer}, {form}", "learning_rate": "0.001", "seed": "0"} for mixer, form in cells]
    write(rows, tmp_path / "rows.csv")

    def missing(seeds: list[int], rates: list[float]) -> list[tuple[str, int]]:
        return statex_budget.missing(tmp_path / "rows.csv", ["GLA", "Mamba2"], seeds, rates)

    assert missing([0], [1e-3]) == [("Mamba2", 0)]
    assert missing([0, 1], [1e-3]) == [("GLA", 1), ("Mamba2", 0), ("Mamba2", 1)]
    assert missing([0], [1e-3, 3e-4]) == [("GLA", 0), ("Mamba2", 0)]


@pytest.mark.nightly
def test_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    texts = [
        f"Text {i} is about {i * i} words, none of which is of use to anybody who reads it. " * 5 for i in range(400)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(Corpus(str(tmp_path / "text.jsonl")), 300).save(tmp_path / "tokenizer.json")
    overrides = ["model.hidden_size=32", "model.num_heads=2", "data.batch_size=2", "data.num_workers=0"]
    overrides += ["data.sequence_length=64", "trainer.max_steps=2", "trainer.val_check_interval=2"]
    overrides += ["trainer.limit_val_batches=2", f"data.sources.mixed.path={tmp_path}/text.jsonl"]
    overrides += ["data.sources.needles.max_characters=100000", f"data.tokenizer={tmp_path}/tokenizer.json"]
    table, folder = tmp_path / "rows.csv", tmp_path / "models"
    evaluation = "--evaluate=--tasks=passkey --lengths=[1024] --samples=1 --device=cpu"
    options = ["--mixers", "GLA", "--rates", "1e-3", f"--table={table}", f"--folder={folder}", evaluation]
    monkeypatch.setattr(sys, "argv", ["statex_budget.py", *overrides, *options])
    statex_budget.main()
    rows = read(table)
    assert [row["cell"] for row in rows] == ["GLA", "GLA, LPT", "GLA, reinit", "GLA, inherit"]
    assert len({row["state_size"] for row in rows[:2]}) == len({row["state_size"] for row in rows[2:]}) == 1
    assert int(rows[2]["state_size"]) > int(rows[1]["state_size"])
    evaluated = read(tmp_path / "rows.evaluations.csv")
    assert [(row["cell"], row["task"]) for row in evaluated] == [(row["cell"], "passkey") for row in rows]
    write(rows[:3], table)  # as if the machine had been lost before the last run
    shutil.rmtree(folder)
    statex_budget.main()
    assert [(row["cell"], row["seed"]) for row in read(table)] == [(row["cell"], "0") for row in rows]
    capsys.readouterr()
    statex_budget.main()
    assert not capsys.readouterr().out
    where = ["--where=sweep=statex_after", "--reference=LPT", "--metric=val_loss"]
    monkeypatch.setattr(sys, "argv", ["main_effects.py", str(table), *where])
    main_effects.main()
    assert "reinit − LPT" in capsys.readouterr().out
