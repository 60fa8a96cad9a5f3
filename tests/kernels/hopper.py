"""Compile kernels in Triton or Gluon for Hopper, without a GPU, in a process that does not interpret Triton.

    python -m tests.kernels.hopper

reads requests from its standard input, one line of JSON each, and answers each with a line: the bytes of shared memory,
or the error. One such process serves all tests of a pytest worker, since starting it takes longer than a compilation.
"""

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any

MOST = 227 * 1024  # bytes that a program may have of a multiprocessor's memory
LONGEST = 120  # seconds of a compilation


def shared_memory(module: str, kernel: str, fixed: dict[str, Any], other: dict[str, str], warps: int = 8) -> int:
    """Bytes of shared memory of a kernel.

    Args:
        module: Where it is.
        kernel: Its name.
        fixed: Arguments that it is compiled for, tensors that are missing among them.
        other: Types of arguments that are no tensors in bf16, whether it has them or not.
        warps: Warps of a program.
    """
    compiler = start()
    assert compiler.stdin
    assert compiler.stdout
    limit = threading.Timer(LONGEST, compiler.kill)
    limit.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([module, kernel, fixed, other, warps]), file=compiler.stdin, flush=True)
        line = compiler.stdout.readline()
    finally:
        limit.cancel()
    if not line:  # it has ended, or has been ended by the limit
        start.cache_clear()
        raise AssertionError(f"{kernel}: the compiler ended with {compiler.wait()}")
    answer = json.loads(line)
    assert isinstance(answer, int), answer
    return answer


@cache
def start() -> "subprocess.Popen[str]":
    """Start the process that compiles. It ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.hopper"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment, cwd=Path(__file__).parents[2])
    atexit.register(process.kill)
    return process


def compiled(module: str, name: str, fixed: dict[str, Any], other: dict[str, str], warps: int) -> int:
    """Compile a kernel, and return its bytes of shared memory; the arguments are those of `shared_memory`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel = getattr(importlib.import_module(module), name)
    names = [p.name for p in kernel.params]
    types = {n: "constexpr" if n in fixed else other.get(n, "*bf16") for n in names}
    pointers = [i for i, n in enumerate(names) if types[n][0] == "*" or n.endswith(("_head", "_batch"))]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    Source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = Source(kernel, types, {(names.index(n),): x for n, x in fixed.items()}, aligned)
    return int(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).metadata.shared)


def serve() -> None:
    """Answer requests until standard input is closed. What else is printed goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answer: int | str
        try:
            answer = compiled(*json.loads(line))
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
