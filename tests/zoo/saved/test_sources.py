"""The files of a user's classes stay with a run, which says if they have changed since."""

import logging
import shutil
from pathlib import Path

import pytest

from tests.commands import FIT, Command

MINE = """
from mixers import GLA

class KeptGLA(GLA):
    def __init__(self, site, *, ratio: float = 0.5):
        super().__init__(site, expand_k=ratio)
"""


@pytest.mark.slow
def test_a_run_says_that_a_file_has_changed(command: Command, desk: Path, caplog: pytest.LogCaptureFixture):
    (desk / "kept_mixers.py").write_text(MINE)
    (desk / "own.yaml").write_text(
        "model: {stack: {class_path: Uniform, init_args: {mixer: kept_mixers.KeptGLA}}}\n"
        "trainer: {callbacks: {class_path: DeviceStatsMonitor}}\n"
    )
    few = ("--trainer.max_steps=1", "--trainer.limit_val_batches=1")
    assert command(*FIT, "--config=own.yaml", *few, "--run=r").code == 0
    (copy,) = (desk / "runs/r/code").iterdir()
    assert copy.read_text() == MINE, "and no file of this project or of Lightning"
    generate = ("generate", "--checkpoint=runs/r", "--max_new_tokens=1")
    commands = {
        "generate": generate,
        "validate": ("validate", "--checkpoint=runs/r", *few[1:]),
        "resume": ("fit", "--resume=runs/r", "--trainer.max_steps=2", *few[1:]),
    }

    def warnings(*arguments: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            command(*arguments)
        return [record.getMessage() for record in caplog.records if "has changed" in record.getMessage()]

    assert not any(warnings(*arguments) for name, arguments in commands.items() if name != "resume")
    (desk / "kept_mixers.py").write_text(MINE.replace("ratio", "share"))  # its key in the config is gone
    for arguments in commands.values():
        (said,) = warnings(*arguments)
        assert said.startswith(f"checkpoint: {desk / 'kept_mixers.py'} has changed since runs/r/checkpoints/last.ckpt")
        assert str(copy.relative_to(desk)) in said
    (desk / "kept_mixers.py").write_text(MINE + "# a comment\n")
    assert warnings("fit", "--resume=runs/r", "--trainer.max_steps=3", *few[1:])
    assert len([*copy.parent.iterdir()]) == 3, "the earlier copies stay"
    assert not warnings(*generate), "the run was continued with the new file"
    shutil.rmtree(copy.parent)
    (desk / "kept_mixers.py").write_text(MINE)
    assert warnings(*generate)[0].endswith("was saved")
