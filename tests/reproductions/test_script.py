"""The command line of scripts: one sentence for whatever ends them early."""

import sys

import pytest

from kernels import UserError
from reproductions.script import run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("file: no"), "error: file: no"),
        (IsADirectoryError(21, "Is a directory", "runs"), "error: [Errno 21] Is a directory: 'runs'"),
        (KeyboardInterrupt(), "stopped; complete rows are in the file"),
    ],
)
def test_a_sentence_ends_a_script(error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch):
    def script(models: list[str] | None = None) -> None:
        assert models == ["gla"]
        raise error

    monkeypatch.setattr(sys, "argv", ["script.py", "--models=[gla]"])
    with pytest.raises(SystemExit) as caught:
        run(script)
    assert caught.value.code == said


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
