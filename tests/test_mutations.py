"""The list of `dev/mutate.py` fits the code: each change applies, and names tests that exist."""

import ast
import re
import shlex
from collections import Counter
from pathlib import Path

from dev.mutate import LIST, ROOT, Mutation, mutations


def missing_names(mutation: Mutation) -> list[str]:
    """Words of the option -k that no test file of a mutation contains."""
    words = shlex.split(mutation.tests)
    if "-k" not in words:
        return []
    text = "".join((ROOT / name).read_text() for name in files_of(mutation))
    chosen = set(re.findall(r"\w+", words[words.index("-k") + 1])) - {"and", "or", "not"}
    return sorted(word for word in chosen if word.lower() not in text.lower())


def files_of(mutation: Mutation) -> list[Path]:
    """The test files of a mutation, also those of folders."""
    paths = [ROOT / name for name in mutation.test_files()]
    return [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]


def test_every_mutation_applies():
    problems = {str(mutation): problem for mutation in mutations() if (problem := mutation.problem())}
    assert not problems


def test_every_mutation_names_its_tests():
    listed = mutations()
    assert not [str(mutation) for mutation in listed if not mutation.test_files()]
    assert not {str(mutation): names for mutation in listed if (names := missing_names(mutation))}


def test_every_mutation_is_python():
    for mutation in mutations():
        ast.parse(mutation.applied(), str(mutation))


def test_the_list_covers_all_packages_and_nothing_twice():
    listed = mutations()
    rooms = Counter(mutation.file.partition("/")[0] for mutation in listed)
    assert len(listed) >= 80
    assert all(rooms[room] >= len(listed) / 4 for room in ("kernels", "mixers", "zoo"))
    assert len({(mutation.file, mutation.before, mutation.after) for mutation in listed}) == len(listed)


def test_a_mutation_that_does_not_apply_says_why(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")

    def problem(**change: str) -> str | None:
        entry = {"file": "a.py", "before": "x = 1", "after": "x = 2", "tests": "tests/test_a.py -k b", "why": "c"}
        return Mutation(**entry | change).problem(tmp_path)

    assert problem() is None
    assert problem(before="= 1") == "`before` occurs 2 times in a.py"
    assert problem(before="x = 3") == "`before` occurs 0 times in a.py"
    assert problem(after="x = 1") == "`after` is `before`"
    assert problem(file="b.py") == "b.py does not exist"
    assert problem(tests="tests/test_b.py") == "tests/test_b.py does not exist"
    assert LIST.is_file()
