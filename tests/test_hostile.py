"""Loading, resuming or evaluating something foreign executes nothing and writes nothing outside the folder
that the user named.

Each case is a fresh copy of a few small folders with one attack on it, which one verb meets in a process of its own.
Everything around is compared afterwards: a tree of canaries, the home folder, the working directory.
"""

import os
import shutil
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import cli

from .commands import CLI, sitting_at
from .forked_python import fork_server
from .hostile import OF_RUNS, VERBS, Case, cases, prepare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")

CASES = {case.name: case for case in cases()}
SAMPLE = (
    "run: folder of checkpoints",
    "link: theirs/config.yaml resumed",
    "pipe: theirs/metrics.jsonl resumed",
    "size: hidden size, resume",
    "archive: a pickle, generate",
    "public: code of its own, convert",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, finished: Path, shared_cache: Path) -> Path:
    """A working directory with a folder of each kind; only to be copied."""
    desk = tmp_path_factory.mktemp("prepared") / "desk"
    desk.mkdir()
    with sitting_at(desk, shared_cache):

        def run(*arguments: str) -> None:
            assert cli.run([*arguments]) == 0

        prepare(desk, run, finished / "runs" / "done")
    return desk


def contents(folder: Path, without: list[Path]) -> dict[str, tuple[int, bytes | str]]:
    """Path → mode, and content or target, of everything in a folder but for some paths."""
    actual: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        if any(path == other or other in path.parents for other in without):
            continue
        mode = path.lstat().st_mode
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if stat.S_ISREG(mode) else ""
        actual[str(path.relative_to(folder))] = mode, content
    return actual


def meet(case: Case, prepared: Path, cache: Path, folder: Path) -> None:
    """Run a case, and assert that it ended cleanly, and with all around it as it was."""
    desk, home, canary = folder / "desk", folder / "home", folder / "canary"
    shutil.copytree(prepared, desk)
    (canary / "folder").mkdir(parents=True)
    for name in ("file", "folder/file", "last.ckpt", "folder/step-00000001.ckpt"):
        (canary / name).write_text(f"precious {name}")
    (canary / "file").chmod(0o640)
    (home / ".config" / "token-mixer-zoo").mkdir(parents=True)
    (home / ".bashrc").write_text("# mine")
    key = Path("token-mixer-zoo") / "key"
    shutil.copy(Path(os.environ["XDG_CONFIG_HOME"]) / key, home / ".config" / key)
    (folder / "tmp").mkdir()
    case.attack(desk)
    log = folder / "log"
    without = [log, folder / "tmp", *(desk / name for name in case.may_write)]
    before = contents(folder, without)
    environment = {"ZOO_CACHE": cache, "HOME": home, "XDG_CONFIG_HOME": home / ".config"}
    environment |= dict.fromkeys(("TMPDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"), folder / "tmp")
    number = fork_server().start(
        [str(CLI), *case.arguments], desk, {name: str(path) for name, path in environment.items()}, log
    )
    ended = fork_server().wait(number, 60)
    with suppress(ProcessLookupError):  # of the child, or of processes that it has left
        os.killpg(number, signal.SIGKILL)
    if ended is None:
        fork_server().wait(number, 10)
    said = log.read_text(errors="replace")
    assert ended is not None, f"{case.name}: it hangs\n{said}"
    told = f"{case.name}: {' '.join(case.arguments)}: exit code {ended}\n{said[-3000:]}"
    assert ended in (0, 2), told
    assert "Traceback" not in said, told
    if ended == 2:
        assert said.count("\nerror: ") + said.startswith("error: ") == 1, told
        assert "\x1b[31m" not in said.rpartition("error: ")[2], told
    after = contents(folder, without)
    assert after.keys() == before.keys(), f"{told}\nnew or lost: {sorted(after.keys() ^ before.keys())}"
    assert after == before, f"{told}\nchanged: {[name for name in after if after[name] != before[name]]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name: str, prepared: Path, shared_cache: Path, tmp_path: Path):
    meet(CASES[name], prepared, shared_cache, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_hostile(name: str, prepared: Path, shared_cache: Path, tmp_path: Path):
    meet(CASES[name], prepared, shared_cache, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("verb", sorted({*VERBS} - {"scaling fit"}))  # which needs runs of several sizes
def test_what_is_harmless_works(verb: str, prepared: Path, shared_cache: Path, tmp_path: Path):
    """Without an attack: the cases above are refused for the attack, and not for a slip in their command lines."""
    inputs = {"convert": "public", "evaluate into": "evaluation", "sweep": "sweep", "sweep into": "fresh"}
    inputs |= {"convert back": "transformer", "initial tensors": "exported"}
    case = Case(verb, lambda desk: None, verb, inputs.get(verb, "theirs"))
    meet(case, prepared, shared_cache, tmp_path)
    said = (tmp_path / "log").read_text()
    # of a run of someone else, only the model and the tokenizer are used
    assert ("error: " in said) == ("was not written by you, and its data, trainer" in said) == (verb in OF_RUNS), said


def test_there_are_enough_cases():
    assert len(CASES) == len([*cases()]) >= 400
    assert {case.verb for case in CASES.values()} == {*VERBS} - {"sweep"}
