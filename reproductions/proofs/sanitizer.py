"""Run proofs under NVIDIA's compute-sanitizer, which watches every access to memory.

    python -m reproductions.proofs.sanitizer memcheck "delta_rule (decay per head, 128)"

The exit code is 1 if it reports errors, and 2 if it cannot run.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kernels import UserError
from reproductions.proofs.findings import as_finding
from zoo.performance.doctor import Finding
from zoo.train.devices import pick_device

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TOOLKITS = ("CUDA_HOME", "CUDA_PATH")  # variables that name the folder of the CUDA toolkit
EACH = 3600  # seconds for an op under the sanitizer: its kernels are many times slower


def program() -> str:
    """The path of compute-sanitizer.

    Raises:
        UserError: It is not installed.
    """
    folders = [str(Path(os.environ[name], "bin")) for name in TOOLKITS if name in os.environ]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    installed = shutil.which("compute-sanitizer", path=path)
    if installed is None:
        raise UserError("compute-sanitizer is not installed; it is part of NVIDIA's CUDA toolkit")
    return installed


def watched(tool: str, only: str) -> Finding:
    """Run the proofs whose names contain a text under a tool of the sanitizer, and count the errors that it reports.

    Raises:
        UserError: There is no GPU, or compute-sanitizer is not installed.
    """
    pick_device("cuda")
    proofs = [sys.executable, "-m", "reproductions.proofs", "--device=cuda", f"--time_limit={EACH}"]
    command = [program(), "--tool", tool, "--target-processes", "all", *proofs, f"--only={only}"]
    # PyTorch's cache of memory would hide accesses beyond a tensor
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    counts = [int(number) for number in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)]
    reported = [
        line.strip("= ") for line in done.stdout.splitlines() if re.match(r"=+ (Error|Warning|Invalid|Unin)", line)
    ]
    name, errors = f"compute-sanitizer of {only}, {tool}", sum(counts)
    if done.returncode < 0 or not counts:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        return as_finding(name, "memory", False, f"exit code {done.returncode}: {last}")
    says = "exact" if not errors else f"{errors} errors, such as: {(reported or ['no message'])[0]}"
    return as_finding(name, "memory", not errors, says, errors=errors, reported=reported[:20])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("only", help="a part of the names of what to examine; kernels become many times slower")
    arguments = parser.parse_args()
    try:
        finding = watched(arguments.tool, arguments.only)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{finding}\n")
    return int(finding.status == "failed")


if __name__ == "__main__":
    sys.exit(main())
