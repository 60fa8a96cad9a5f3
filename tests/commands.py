"""The command line as a function, at a size that takes a second. The fixtures are in `desk.py`."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import cli

from .forked_python import forked_python

CLI = Path(cli.__file__)
ROOT = CLI.parent
TINY = """
model: {hidden_size: 32, num_heads: 2, num_layers: 3}
data: {sequence_length: 32, batch_size: 2, max_characters: 200000, vocab_size: 512}
trainer: {max_steps: 4, limit_val_batches: 2, val_check_interval: 4, log_every_n_steps: 1, accelerator: cpu}
samples: {max_new_tokens: 4}
"""
FIT = ("fit", "--config", "gdn_h2.yaml", "--config", "tiny.yaml")


class Finished(NamedTuple):
    """What a command left on the terminal."""

    code: int
    out: str
    err: str

    def ok(self) -> "Finished":
        """Return this after a check that the command succeeded."""
        assert self.code == 0, self.err
        return self

    def refused(self) -> "Finished":
        """Return this after a check that the command ended with a mistake of the user."""
        assert self.code == 2, self.err
        return self

    def sentence(self) -> str:
        """Return the answer to a mistake of the user, after a check that it is one sentence."""
        self.refused()
        assert self.err.startswith("error: "), self.err
        assert len(self.err.splitlines()) == 1, self.err
        return self.err.removeprefix("error: ").rstrip("\n")


Command = Callable[..., Finished]


@contextmanager
def sitting_at(folder: Path, cache: Path) -> Iterator[None]:
    """A person at a terminal in `folder`; what a command does to the process is undone."""
    (folder / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ZOO_CACHE", str(cache))
        patch.setenv("COLUMNS", "200")  # tables and help are not wrapped
        patch.setenv("ZOO_RUN", "")  # set by a run for the processes that it may start
        patch.setattr(sys, "argv", list(sys.argv))
        yield


def start(
    folder: Path, cache: Path, *arguments: str, fresh: bool = False, **environment: str
) -> "subprocess.Popen[str]":
    """`python cli.py …` as a process of its own, in `folder`.

    Args:
        folder: The working directory.
        cache: Where tokens lie.
        arguments: What follows `python cli.py`.
        fresh: Whether to start a new interpreter instead of forking one that has imported the project.
        environment: Variables to set.
    """
    return subprocess.Popen(
        [sys.executable if fresh else forked_python(), str(CLI), *arguments],
        cwd=folder,
        env={**os.environ, "TRITON_INTERPRET": "0", "ZOO_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_process(
    folder: Path, cache: Path, *arguments: str, fresh: bool = False, timeout: float = 240, **environment: str
) -> Finished:
    """Wait for the end of a process of `start`, which uses one thread, as another order of a sum is another sum."""
    settings = {"OMP_NUM_THREADS": "1", "ZOO_RUN": "", **environment}
    process = start(folder, cache, *arguments, fresh=fresh, **settings)
    out, err = process.communicate(timeout=timeout)
    return Finished(process.returncode, out, err)
