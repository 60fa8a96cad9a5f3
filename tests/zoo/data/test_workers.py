"""Worker processes end with what they work for, however that ends."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernels import UserError
from tests.commands import CLI, FIT
from tests.forked_python import fork_server
from zoo.data import MarkovChain
from zoo.data.workers import context, only_killed_by

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no such workers")

PATIENCE = 120  # seconds, many times what anything here takes
# PyTorch's workers look every 5 s whether their parent lives. Here they do not, so that only the project can end them.
ONLY_OURS = "import torch.utils.data._utils.worker as worker; worker.MP_STATUS_CHECK_INTERVAL = 3600"

STOPPER = f"""
{ONLY_OURS}
import os, signal
import lightning as L

class Stop(L.Callback):
    '''Ends its run while it is validated.'''

    def __init__(self, how: str, where: str) -> None:
        self.how, self.where = how, where

    def go(self, where: str) -> None:
        if where != self.where:
            return
        number = signal.SIGINT if self.how.endswith("INT") else signal.SIGTERM
        if self.how == "raise":
            raise RuntimeError("a mistake")
        os.killpg(0, number) if self.how.startswith("group") else os.kill(os.getpid(), number)

    def on_validation_start(self, trainer, module):
        self.go("start")

    def on_validation_batch_end(self, trainer, *given):
        self.go("batch")
"""


def alive(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    actual = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(of_group) == group and state != "Z":
            actual.append(int(folder.name))
    return actual


def wait_until_none_is(group: int) -> list[int]:
    until = time.monotonic() + PATIENCE
    while (left := alive(group)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@contextmanager
def started(command: list[str], folder: Path, **environment: str) -> Iterator[int]:
    """The id of a process, and of its group, whose output goes to `log` in a folder; none of it is left afterwards."""
    process = fork_server().start(command, folder, environment, folder / "log")
    try:
        yield process
    finally:
        if alive(process):
            os.killpg(process, signal.SIGKILL)


def wait_until_at_work(folder: Path) -> None:
    until = time.monotonic() + PATIENCE
    while "at work\n" not in (folder / "log").read_text():
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "where"),
    [
        ("raise", 1, "batch"),
        ("INT", 130, "batch"),
        ("group INT", 130, "start"),
        ("TERM", 143, "batch"),
        ("group TERM", 143, "batch"),
        ("group TERM", 143, "start"),
    ],
)
def test_a_run_that_ends_in_a_validation_ends(desk: Path, shared_cache: Path, how: str, code: int, where: str):
    (desk / "stopper.py").write_text(STOPPER)
    (desk / "stop.yaml").write_text(
        f"trainer: {{callbacks: {{class_path: stopper.Stop, init_args: {{how: {how}, where: {where}}}}}}}\n"
    )
    command = [str(CLI), *FIT, "--config", "stop.yaml", "--data.num_workers=2"]
    with started(command, desk, ZOO_CACHE=str(shared_cache)) as process:
        ended = fork_server().wait(process, PATIENCE)
        assert ended is not None
        assert ended == code, (desk / "log").read_text()
        assert not wait_until_none_is(process)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["teardown", "on_exception"])
def test_data_that_is_not_wanted_any_more_has_no_workers(end: str):
    """Of training and of evaluations that were left early."""
    data = MarkovChain(num_workers=2)
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    batches = [iter(loader) for loader in loaders]
    first = [next(each) for each in batches]
    assert len(multiprocessing.active_children()) == 2 * len(first)
    data.teardown() if end == "teardown" else data.on_exception(KeyboardInterrupt())
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_workers_end_with_their_data():
    data = MarkovChain(num_workers=2)
    batches = iter(data.train_dataloader())
    next(batches)
    del data, batches  # no collector of cycles is needed
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("error", "reported"), [(ConnectionResetError(104, "reset"), False), (EOFError(), False), (OSError(5, "I/O"), True)]
)
def test_a_worker_does_not_report_that_its_parent_was_killed(error: OSError, reported: bool, capfd):
    def pass_on_tensors(parent: int) -> None:
        only_killed_by(parent)
        sys.excepthook(type(error), error, None)

    worker = context().Process(target=pass_on_tensors, args=(os.getpid(),))
    worker.start()
    worker.join()
    assert (type(error).__name__ in capfd.readouterr().err) == reported


READING = f"""
{ONLY_OURS}
import sys, time
sys.modules["tabulate"] = None  # PyTorch imports it at exit, whereupon CPython forgets that it was interrupted
from zoo.data import MarkovChain
data = MarkovChain(num_workers=2)
batches = [iter(data.train_dataloader()), iter(data.val_dataloader())]
[next(each) for each in batches]
sys.stdout.write("at work\\n"), sys.stdout.flush()
time.sleep(600)
"""
TOKENISING = """
import sys, time
from zoo.data import Corpus, train_tokenizer
from zoo.data.text.encoding import Piece, encode_all
def slowly():
    while True:
        yield [Piece("train", "some text", True, True)]
        time.sleep(0.01)
for number, _ in enumerate(encode_all(slowly(), train_tokenizer(Corpus(max_characters=20_000), 300), 3)):
    if number == 10:
        sys.stdout.write("at work\\n"), sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [READING, TOKENISING], ids=["reading", "tokenising"])
def test_kill_9_leaves_no_worker(program: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(program)
    with started([str(tmp_path / "program.py")], tmp_path) as process:
        wait_until_at_work(tmp_path)
        assert len(alive(process)) > 3
        os.kill(process, signal.SIGKILL)
        assert fork_server().wait(process, PATIENCE)
        assert not wait_until_none_is(process)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_a_signal_to_all_leaves_no_worker(signals: tuple[signal.Signals, ...], tmp_path: Path):
    """Of a program that does not handle them; its workers leave them to it."""
    (tmp_path / "program.py").write_text(READING)
    with started([str(tmp_path / "program.py")], tmp_path) as process:
        wait_until_at_work(tmp_path)
        for number in signals:
            os.killpg(process, number)
        ended = fork_server().wait(process, PATIENCE)
        assert ended is not None
        assert ended == -signals[0]
        assert not wait_until_none_is(process)


def test_a_number_of_workers_without_end_is_refused():
    with pytest.raises(UserError, match=r"num_workers: 1,000,000,000 processes per device; at most 1,024 are started"):
        MarkovChain(num_workers=10**9)
