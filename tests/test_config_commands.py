"""The commands in the headers of configs parse and name their config; what they fetch is what the config reads."""

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .command_lines import parse_command
from .shipped_configs import (
    CONTENTS,
    PAPERS,
    PUBLISHED_TEXT,
    RUNS_AS_IT_IS,
    SIZED,
    WHOLE,
    commands,
    header,
    named,
    sizes_of,
)

COMMANDS = [(name, command) for name in SIZED for command in commands(name)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_config_opens_with_its_command(name: str):
    assert commands(name)
    if name in RUNS_AS_IT_IS:
        assert commands(name) == [f"python cli.py fit --config {name}"]
    assert len(header(name)) > 3 + len(commands(name)), "after the command comes what to expect"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"), [pytest.param(name, line, id=line.partition(" --data")[0]) for name, line in COMMANDS]
)
def test_a_command_of_a_header_parses(name: str, line: str):
    files = named(line)
    assert files[0] == name
    assert set(files) & set(sizes_of(name))
    config = parse_command(shlex.split(line)[2:])
    assert config.model.hidden_size == CONTENTS[files[1]]["model"]["hidden_size"]
    assert config.data.init_args.tokenizer.endswith("tokenizer.json")


@pytest.mark.parametrize("name", PUBLISHED_TEXT)
def test_what_a_data_config_reads_is_what_its_commands_fetch(name: str):
    fetched = [shlex.split(line.removeprefix("#   ")) for line in header(name) if "hf download" in line]
    folders = [words[words.index("--local-dir") + 1] for words in fetched]
    data = CONTENTS[name]["data"]
    read = [data["path"], *(text["path"] for text in data.get("validation_sets", {}).values()), data["tokenizer"]]
    assert all(f"{path}/".startswith(f"{folders[0]}/") for path in read[:-1])
    assert read[-1] == f"{folders[1]}/{fetched[1][3]}"
    included = [pattern for word, pattern in itertools.pairwise(fetched[0]) if word == "--include"] or [""]
    for path in read[:-1]:
        part = path.removeprefix(folders[0]).strip("/")
        assert path.endswith(".txt") or any(pattern.startswith(part) for pattern in included), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name in (*PAPERS, *PUBLISHED_TEXT) for line in commands(name)], ids=str
)
def test_a_command_of_an_overlay_parses(name: str, line: str):
    assert name in named(line)
    assert parse_command(shlex.split(line)[2:])


@pytest.mark.slow
def test_wikitext_is_made_of_its_rows(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder = tmp_path / "corpora" / "wikitext" / "wikitext-103-raw-v1"
    folder.mkdir(parents=True)
    for number, part in enumerate(("train", "train", "validation", "test")):
        rows = ["", f" = Title {number} = \n", " é words \n"]
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"{part}-0000{number}-of-2.parquet")
    lines = [line.removeprefix("#   ") for line in header("data/wikitext_103.yaml")]
    loop = "\n".join(
        lines[next(n for n, line in enumerate(lines) if line.startswith("for ")) : lines.index("done") + 1]
    )
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is the one of this test
    subprocess.run(["bash", "-c", loop], cwd=tmp_path, env={**os.environ, "PATH": programs}, check=True)
    text = (folder.parent / "train.txt").read_text()
    assert text == " = Title 0 = \n é words \n = Title 1 = \n é words \n"
    assert (folder.parent / "test.txt").read_text().startswith(" = Title 3 = ")
