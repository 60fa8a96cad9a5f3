"""The command line as a function, at a size that takes a second; loaded by test modules as a plug-in."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import cli

CLI = Path(cli.__file__)
ROOT = CLI.parent
TINY = """
model: {hidden_size: 32, num_heads: 2, num_layers: 3}
data: {sequence_length: 32, batch_size: 2, max_characters: 200000, vocab_size: 512}
trainer: {max_steps: 4, limit_val_batches: 2, val_check_interval: 4, log_every_n_steps: 1, accelerator: cpu}
samples: {max_new_tokens: 4}
"""


class Finished(NamedTuple):
    """What a command left on the terminal."""

    code: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all commands, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def desk(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where a person types commands: empty but for tiny.yaml, and outside the repository."""
    folder = tmp_path / "desk"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ZOO_CACHE", str(shared_cache))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a command adds the working directory
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("COLUMNS", "200")  # tables and help are not wrapped
    yield folder
    os.environ.pop("ZOO_RUN", None)


@pytest.fixture
def command(desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command("fit", …)` is `python cli.py fit …` without the seconds that a new process needs for its imports."""

    def call(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", [str(CLI), *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Finished(exit_.value.code, captured.out, captured.err)

    return call


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python cli.py …` as a process of its own, in `folder`."""
    return subprocess.Popen(
        [sys.executable, str(CLI), *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
