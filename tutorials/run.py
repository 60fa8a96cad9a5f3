"""Run all blocks of a tutorial, top to bottom, in the current folder.

    python tutorials/run.py tutorials/01_first_hybrid.md            as a reader would
    python tutorials/run.py tutorials/01_first_hybrid.md --small    as the tests do

Python blocks share one namespace. A block that opens with `# file: NAME` is saved under that name. `--small` puts in
place of a value what a comment after it says: `steps = 300  # in the tests: 8` becomes `steps = 8`.
"""

import argparse
import linecache
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

CLI = Path(__file__).parents[1] / "cli.py"
BLOCK = re.compile(r"^```(python|bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# file: (\S+)\n")
SMALL = re.compile(r"=(\s*)\S+(?=\s+# in the tests: (\S+)$)", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block."""

    language: str
    line: int  # its first one in the file
    code: str


def blocks(file: Path, small: bool) -> list[Block]:
    """The python, bash and yaml blocks of a tutorial."""
    text = file.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        code = SMALL.sub(r"=\1\2", match[2]) if small else match[2]
        found.append(Block(match[1], text.count("\n", 0, match.start()) + 2, code))
    return found


def run(block: Block, name: str, namespace: dict[str, Any]) -> None:
    """Run one block; raises if it fails."""
    if file := FILE.match(block.code):
        Path(file[1]).write_text(block.code[file.end() :], encoding="utf-8")
    elif block.language == "bash":
        code = block.code.replace("python cli.py", f"'{sys.executable}' '{CLI}'")
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
    else:
        source = f"{name}:{block.line}"
        linecache.cache[source] = (len(block.code), None, block.code.splitlines(True), source)  # tracebacks quote it
        exec(compile(block.code, source, "exec"), namespace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "agg")
    sys.path[0] = os.getcwd()  # as in a Python session
    Path("runs").mkdir(exist_ok=True)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(arguments.file, arguments.small):
        start = time.perf_counter()
        try:
            run(block, arguments.file.name, namespace)
        except BaseException:
            sys.stdout.flush()
            sys.stderr.write(f"{arguments.file}:{block.line}: this block failed:\n\n{block.code}\n")
            raise
        sys.stdout.flush()
        sys.stderr.write(f"── {arguments.file.name}:{block.line} {time.perf_counter() - start:.1f} s ──\n")


if __name__ == "__main__":
    main()
