"""Count habits of style that make the project's English hard to read, for each directory.

    python dev/english.py              a table; exits with 1 where a limit is exceeded
    python dev/english.py --list       every place as well

Three habits are counted in Python files: docstrings that open with What, Whether, How or the like instead of saying
what a function returns or does; variables that are named after their history (`found`) instead of their content
(`gradients`); and phrases of private idiom for which there is a plain word.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "mixers", "zoo")
OPENING = re.compile(r"(What|Whether|The same|Of|How|Where|Which|As many as)\b")
NAMES = {"given", "found", "known", "again"}
PHRASES = re.compile(
    r"\b(is no|beside|stands|held to|a test holds|as it is|as printed|by itself|of ours|of theirs|its own|as many as"
    r"|so that they|in the place of|told|asked for|at once|goes on|carries on|need not)\b"
)
LIMITS = {"openings": 0, "names": 0, "phrases": 30}  # over all rooms together


def places(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the habit, the line and the words of each place in a Python file."""
    text = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            match = OPENING.match(ast.get_docstring(node) or "")
            if match:
                yield "openings", node.body[0].lineno, match[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield "names", node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield "names", node.lineno, node.arg
    for number, line in enumerate(text.splitlines(), 1):
        for match in PHRASES.finditer(line):
            yield "phrases", number, match[0]


def all_places() -> Iterator[tuple[str, Path, str, int, str]]:
    """Yield the directory, the file, the habit, the line and the words of each place in the project."""
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for habit, line, words in places(file):
                yield room, file.relative_to(ROOT), habit, line, words


def exceeded(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return the habits that are more frequent than their limits, with their numbers."""
    totals = {habit: sum(counts[room, habit] for room in ROOMS) for habit in LIMITS}
    return {habit: total for habit, total in totals.items() if total > LIMITS[habit]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list every place")
    arguments = parser.parse_args()
    console, counts = Console(width=120), Counter[tuple[str, str]]()
    for room, file, habit, line, words in all_places():
        counts[room, habit] += 1
        if arguments.list:
            console.print(f"{file}:{line}: {habit}: {words}", highlight=False)
    table = Table("habit", *ROOMS, "all", "limit")
    for habit, limit in LIMITS.items():
        numbers = [counts[room, habit] for room in ROOMS]
        table.add_row(habit, *map(str, numbers), str(sum(numbers)), str(limit))
    console.print(table)
    sys.exit(int(bool(exceeded(counts))))


if __name__ == "__main__":
    main()
