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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list every place")
    arguments = parser.parse_args()
    console, counts = Console(width=120), Counter[tuple[str, str]]()
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for habit, line, words in places(file):
                counts[room, habit] += 1
                if arguments.list:
                    console.print(f"{file.relative_to(ROOT)}:{line}: {habit}: {words}", highlight=False)
    table = Table("habit", *ROOMS, "all", "limit")
    exceeded = False
    for habit, limit in LIMITS.items():
        total = sum(counts[room, habit] for room in ROOMS)
        exceeded |= total > limit
        table.add_row(habit, *(str(counts[room, habit]) for room in ROOMS), str(total), str(limit))
    console.print(table)
    sys.exit(int(exceeded))


if __name__ == "__main__":
    main()
