"""`compare` trains several configs, keeps what is finished, and shows one table and one picture."""

import json

import pytest

from zoo.sweeps.comparison import whole_configs

pytest_plugins = "tests.desk"

TINY = [
    "--model.hidden_size=32",
    "--model.num_heads=2",
    "--model.num_layers=3",
    "--data.sequence_length=32",
    "--data.batch_size=2",
    "--data.max_characters=200000",
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--samples.max_new_tokens=2",
]


@pytest.mark.slow
def test_two_configs_one_table_and_nothing_twice(command, tmp_path) -> None:
    configs = ["gdn_h2.yaml", "gla.yaml"]
    first = command("compare", *configs, *TINY, f"--folder={tmp_path}/out")
    assert first.code == 0, first.err
    for name in ("gdn_h2", "gla", "bigram model"):
        assert name in first.out
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["run"] for row in rows] == ["gdn_h2", "gla"]
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 5000
    written = (tmp_path / "out" / "gla" / "metrics.jsonl").stat().st_mtime_ns
    again = command("compare", *configs, *TINY, f"--folder={tmp_path}/out")
    assert again.code == 0
    assert (tmp_path / "out" / "gla" / "metrics.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gdn_h3.yaml"], "did you mean"),
        (["gla.yaml", "--model.hiden_size=3"], "did you mean 'hidden_size'"),
        (["gla.yaml", "--jobs=0"], "jobs: 0 must be at least 1"),
        (["gla.yaml", "--jobs"], "jobs"),
    ],
)
def test_a_mistake_is_named_before_the_first_run(command, tmp_path, arguments, expected) -> None:
    done = command("compare", *arguments, f"--folder={tmp_path}/out")
    assert done.code == 2
    assert expected in done.err
    assert not (tmp_path / "out").exists()


def test_overlays_are_no_whole_configs() -> None:
    assert "gdn_h2.yaml" in whole_configs()
    assert not any("/" in name for name in whole_configs())
