"""Jobs in processes that may hang or crash."""

import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest

from reproductions.proofs import workers


def work(job: str) -> Iterator[str]:
    yield f"{job} began"
    if job == "hangs":
        time.sleep(600)
    if job == "crashes":
        os._exit(3)
    if job == "raises":
        raise RuntimeError("out of memory")
    yield f"{job} ended"


def test_what_hangs_or_crashes_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    """In processes that are forked, which spares their imports."""
    monkeypatch.setattr(workers, "get_context", lambda method: multiprocessing.get_context("fork"))
    jobs = ["a", "hangs", "b", "crashes", "raises", "c", "d"]
    now, done = [0.0], {}
    monkeypatch.setattr(workers, "monotonic", lambda: now[0])  # however slow this machine is, only one job takes long
    for each in workers.side_by_side(work, jobs, 2, 1.0):
        done[each.job] = each
        if len(done) == len(jobs) - 1:
            now[0] = 2.0
    assert {*done} == {*jobs}
    for job in "abcd":
        assert (done[job].results, done[job].problem) == ([f"{job} began", f"{job} ended"], None)
    assert done["hangs"].problem == "did not finish in 1 s"
    assert done["crashes"].problem == "the process ended with exit code 3"
    assert done["raises"].problem == "RuntimeError: out of memory"
    for job in ("hangs", "crashes", "raises"):
        assert done[job].results == [f"{job} began"]  # nothing that was found is lost
    assert not multiprocessing.active_children()


def test_processes_end_with_the_caller(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "get_context", lambda method: multiprocessing.get_context("fork"))
    jobs = workers.side_by_side(work, ["a", "hangs"], 2, 60.0)
    assert next(jobs).job == "a"
    jobs.close()
    assert not multiprocessing.active_children()
