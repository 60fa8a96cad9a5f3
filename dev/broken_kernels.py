"""Check that the proofs notice faults of GPU kernels, races among them; for a machine with a Hopper GPU.

    python dev/broken_kernels.py --output found.json
    python dev/broken_kernels.py --only race

`broken_kernels.toml` lists the faults. Each is made in a copy of the tracked files, one at a time, and there
`reproductions/proofs` examines the calls that run the kernel. A kernel that hangs is stopped. The same calls are
examined without a fault first: they must pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from dev.mutate import ROOT, copy_tracked

LIST = ROOT / "dev" / "broken_kernels.toml"
JOB_LIMIT, LIMIT = 90, 240  # seconds for the calls, and for all of the proofs


@dataclass(frozen=True)
class Fault:
    """A change of one file.

    Attributes:
        why: The fault, in a few words.
        file: The file to change, relative to the root.
        before: Text that occurs exactly once in it.
        after: Its replacement.
        only: Name of the call that runs the kernel, among those of the proofs.
    """

    why: str
    file: str
    before: str
    after: str
    only: str

    def applied(self, root: Path = ROOT) -> str:
        """The changed text of the file.

        Raises:
            ValueError: `before` does not occur once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"`before` occurs {count} times in {self.file}: {self.why}")
        return text.replace(self.before, self.after)


def faults(path: Path = LIST) -> list[Fault]:
    """Read the list."""
    with open(path, "rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def examined(fault: Fault | str) -> list[str]:
    """The checks that fail, or why there are none; of a name, without a fault."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_tracked(folder)
        if isinstance(fault, Fault):
            (folder / fault.file).write_text(fault.applied(folder), encoding="utf-8")
        only = fault.only if isinstance(fault, Fault) else fault
        command = [sys.executable, "-m", "reproductions.proofs", f"--only={only}", f"--time_limit={JOB_LIMIT}"]
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            done = subprocess.run(
                [*command, "--device=cuda", "--output=proofs.json"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return [f"did not finish in {LIMIT} s"]
        if done.returncode not in (0, 1) or not (folder / "proofs.json").is_file():
            return [f"error: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"]
        record = json.loads((folder / "proofs.json").read_text(encoding="utf-8"))
    return [each["check"] for each in record["proofs of ops"] if each["status"] == "failed"]


def main() -> int:
    """Run the command line; the exit code is 0 if every fault was found and nothing else."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only faults whose file or reason contains this")
    parser.add_argument("--jobs", type=int, default=4, help="faults at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outcomes to a JSON file")
    arguments = parser.parse_args()
    chosen = [fault for fault in faults() if arguments.only in f"{fault.file}: {fault.why}"]
    if not chosen:
        parser.error(f"argument --only: no fault contains {arguments.only!r}")
    return int(not examine(chosen, arguments.jobs, arguments.output))


def examine(chosen: Sequence[Fault], jobs: int, output: Path | None) -> bool:
    """Print what is found of each fault as it ends, and return whether it is what was to be found."""
    console, rows, right = Console(), list[dict[str, object]](), True
    with ThreadPoolExecutor(jobs) as pool:
        healthy = dict.fromkeys(fault.only for fault in chosen)
        running = {pool.submit(examined, work): work for work in (*healthy, *chosen)}
        for future in as_completed(running):
            work, checks = running[future], future.result()
            expected = isinstance(work, Fault) and not work.why.startswith("no fault")
            right &= bool(checks) == expected
            says = f"found by {', '.join(checks)}" if checks else "nothing found"
            what = work.why if isinstance(work, Fault) else f"without a fault: {work}"
            console.print(f"{what}: {says}", style="green" if bool(checks) == expected else "red", soft_wrap=True)
            rows.append((asdict(work) if isinstance(work, Fault) else {"only": work}) | {"found": checks})
            if output is not None:  # also of what an interruption leaves
                output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return right


if __name__ == "__main__":
    sys.exit(main())
