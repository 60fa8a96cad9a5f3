"""Every tutorial runs from top to bottom, in its small setting, and what it refers to exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .forked_python import forked_python

pytest_plugins = "tests.desk"

TUTORIALS = Path(__file__).parents[1] / "tutorials"
FILES = sorted(TUTORIALS.glob("*.md"))
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def links(file: Path) -> list[tuple[bool, str]]:
    """(whether it is a picture, its target) of each link within the repository."""
    found = LINK.findall(re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL))
    return [(mark == "!", target.partition("#")[0]) for mark, target in found if "://" not in target]


def run(folder: Path, cache: Path, script: str, *arguments: str, python: str | None = None) -> str:
    """What a script beside the tutorials prints."""
    environment = {**os.environ, "ZOO_CACHE": str(cache), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python or forked_python(), str(TUTORIALS / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=1200,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_and_makes_its_pictures(file: Path, tmp_path: Path, shared_cache: Path):
    (tmp_path / "tutorials" / "pictures").mkdir(parents=True)
    shutil.copytree(TUTORIALS / "measured", tmp_path / "tutorials" / "measured")  # on machines that few have
    interpreted = "TRITON_INTERPRET" in file.read_text(encoding="utf-8")  # Triton reads it when it is imported
    run(tmp_path, shared_cache, "run.py", str(file), "--small", python=sys.executable if interpreted else None)
    for is_picture, target in links(file):
        if is_picture:
            assert (tmp_path / "tutorials" / target).is_file(), f"no block of {file.name} makes {target}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixers", [["GLA"], pytest.param(["GLA", "Mamba2"], marks=pytest.mark.nightly)], ids=["GLA", "GLA and Mamba2"]
)
def test_statex_end_to_end(mixers: list[str], tmp_path: Path, shared_cache: Path):
    printed = run(tmp_path, shared_cache, "statex_end_to_end.py", "--small", "--jobs=1", "--mixers", *mixers)
    for form in ("original", "LPT", "reinit", "inherit", "preserve"):
        assert len(re.findall(rf"│ {form} +│", printed)) == 2 * len(mixers)  # two tasks
    assert (tmp_path / "runs/statex/statex.png").is_file()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_links_lead_somewhere(file: Path):
    for is_picture, target in links(file):
        path = file.parent / target
        assert path.exists(), f"{file.name} refers to {target}, which does not exist"
        if is_picture:
            assert path.stat().st_size < 100_000, f"{target} is larger than 100 kB"


def test_there_are_tutorials():
    assert [file.name[:2] for file in FILES] == [f"{i:02}" for i in range(1, len(FILES) + 1)]
    assert FILES
