"""Compile a kernel in Triton or Gluon for Hopper, without a GPU, in a process that does not interpret Triton."""

import json
import os
import subprocess
import sys
from typing import Any

MOST = 227 * 1024  # bytes that a program may have of a multiprocessor's memory
COMPILE = """
import importlib
import json
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

module, name, fixed, other, warps = json.loads(sys.argv[1])
kernel = getattr(importlib.import_module(module), name)
names = [p.name for p in kernel.params]
types = {n: "constexpr" if n in fixed else other.get(n, "*bf16") for n in names}
aligned = [i for i, n in enumerate(names) if types[n][0] == "*" or n.endswith(("_head", "_batch"))]
aligned = {(i,): [["tt.divisibility", 16]] for i in aligned}
Source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
source = Source(kernel, types, {(names.index(n),): x for n, x in fixed.items()}, aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).metadata.shared)
"""


def shared_memory(module: str, kernel: str, fixed: dict[str, Any], other: dict[str, str], warps: int = 8) -> int:
    """Bytes of shared memory of a kernel.

    Args:
        module: Where it is.
        kernel: Its name.
        fixed: Arguments that it is compiled for, tensors that are missing among them.
        other: Types of arguments that are no tensors in bf16, whether it has them or not.
        warps: Warps of a program.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = [sys.executable, "-c", COMPILE, json.dumps([module, kernel, fixed, other, warps])]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
