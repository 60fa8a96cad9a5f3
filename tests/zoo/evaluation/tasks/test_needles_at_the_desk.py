"""Needle tasks by `python cli.py evaluate`."""

import json
from pathlib import Path

import pytest

from tests.commands import Command


@pytest.mark.slow
def test_a_run_that_never_saw_a_needle_recalls_none(finished: Path, desk: Path, command: Command):
    run = ("evaluate", "--checkpoint", str(finished / "runs" / "done"), "--samples=2")
    done = command(
        *run, "--tasks=s_niah_1,passkey,reproductions.niah.NiahEasy", "--lengths=256,384", "--output=out"
    ).ok()
    rows = [row for line in (desk / "out" / "rows.jsonl").read_text().splitlines() for row in json.loads(line)["rows"]]
    assert {row["value"] for row in rows} == {0}
    assert len(rows) == 2 * (1 + 1 + 35)
    assert "niah score" in done.out
    assert {"niah_easy-depth.png", "niah_easy-depth.svg", "passkey.png"} <= {path.name for path in desk.glob("out/*")}
    said = command(*run, "--tasks=passkey", "--lengths=[8]").sentence()
    assert "passkey: a length of 8 tokens is too small" in said
    assert command("evaluate", "--tasks=list").out.count("_niah_") == 5
    absent = command(*run, "--tasks=reproductions.niah.Niah").refused()
    assert absent.err == "error: tasks: the module 'reproductions.niah' has no 'Niah'; did you mean 'NiahEasy'?\n"


@pytest.mark.slow
def test_a_grid_of_depth_and_length(finished: Path, desk: Path, command: Command):
    grid = ("--depths=[0,0.5,1]", "--lengths=[128,256]", "--samples=1", "--output=out")
    command("evaluate", "--checkpoint", str(finished / "runs" / "done"), "--tasks=passkey", *grid).ok()
    rows = [row for line in (desk / "out" / "rows.jsonl").read_text().splitlines() for row in json.loads(line)["rows"]]
    assert {(row["length"], row["depth"]) for row in rows} == {(n, d) for n in (128, 256) for d in (0, 0.5, 1)}
    assert (desk / "out" / "passkey-depth.png").exists()
