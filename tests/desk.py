"""Fixtures around a person at a terminal. They import the command line only when a test uses them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .commands import Command
    from .hub_server import Hub


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all commands, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """A folder with `tiny.yaml` and the complete run `runs/done`; only to be read."""
    import cli

    from .commands import FIT, sitting_at

    folder = tmp_path_factory.mktemp("finished")
    with sitting_at(folder, shared_cache):
        assert cli.run([*FIT, "--run", "done"]) == 0
    return folder


@pytest.fixture
def desk(tmp_path: Path, shared_cache: Path) -> Iterator[Path]:
    """The working directory: outside the repository, and empty but for `tiny.yaml`."""
    from .commands import sitting_at

    folder = tmp_path / "desk"
    folder.mkdir()
    with sitting_at(folder, shared_cache):
        yield folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Hub"]:
    """A stand-in for the Hub where its client looks for it, an empty cache, and the token of ada, of `engines`."""
    from .hub_server import point_at, serving

    with serving() as made:
        point_at(made.url, tmp_path / "hub", monkeypatch)
        yield made


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of sweeps, comparisons and stages are forked from a process that has imported the project."""
    from zoo.experiments import commands, linearise

    from .commands import CLI
    from .forked_python import forked_python

    for module in (commands, linearise):
        monkeypatch.setattr(module, "COMMAND", (forked_python(), str(CLI)))


@pytest.fixture
def command(desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> "Command":
    """`command("fit", …)` is `python cli.py fit …` without the seconds that a new process needs for its imports."""
    import cli

    from .commands import CLI, Finished

    def call(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", [str(CLI), *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Finished(exit_.value.code, captured.out, captured.err)

    return call
