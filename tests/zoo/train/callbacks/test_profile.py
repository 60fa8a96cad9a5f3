"""Some steps, recorded."""

import gzip
import json

import pytest

from kernels.errors import UserError
from tests.zoo.tiny import LossLog, ResumableLoader, pretraining, trainer, validation_loader
from zoo.train.callbacks.profile import Profile
from zoo.train.callbacks.result_row import ResultRow


def fit(folder, *callbacks, steps=6, **options):
    trainer(folder, callbacks, steps, val_check_interval=40, **options).fit(
        pretraining(), ResumableLoader(40), validation_loader()
    )
    return folder / "profile"


def recorded(folder):
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}), events


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_so_many_steps_are_recorded(accumulated, tmp_path):
    folder = fit(tmp_path / "with", Profile(steps=3, after=2), log := LossLog(), accumulate_grad_batches=accumulated)
    steps, events = recorded(folder)
    assert steps == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    products = [event for event in events if event.get("name") == "aten::embedding"]
    assert len(products) == 3 * accumulated
    table = (folder / "table.txt").read_text()
    assert "Self CPU" in table
    assert "aten::mm" in table
    assert not fit(tmp_path / "without", Profile(), plain := LossLog(), accumulate_grad_batches=accumulated).exists()
    assert plain.losses == log.losses


def test_a_run_that_is_too_short_leaves_what_there_is_and_says_where(tmp_path, capsys):
    folder = fit(tmp_path, Profile(steps=10, after=1), ResultRow(), steps=4)
    assert "results, curve, profile" in capsys.readouterr().out
    assert recorded(folder)[0][0] == "ProfilerStep#1"
    assert (folder / "table.txt").is_file()


def test_a_run_that_fails_tells_why(tmp_path):
    class Fails(LossLog):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 3:
                raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path, Profile(steps=3, after=1), Fails())
    assert recorded(tmp_path / "profile")[0][0] == "ProfilerStep#1"


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"after": 0}], ids=str)
def test_out_of_range(wrong):
    with pytest.raises(UserError, match="profile: steps is"):
        Profile(**wrong)
