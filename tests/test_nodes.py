"""Two nodes, played by two processes on this machine: the launchers that tutorial 08 names."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from .commands import CLI, FIT, sitting_at, start
from .forked_python import forked_python

NODES = ("--trainer.num_nodes=2", "--trainer.devices=1")
BESIDE = Path(sys.executable).parent  # where the launchers were installed


def torchrun(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What a person types on node `node`, and what is in the environment there."""
    rendezvous = ("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=nodes")
    command = [str(BESIDE / "torchrun"), "--nnodes=2", "--nproc_per_node=1", *rendezvous, "--", str(CLI)]
    return command, {"PYTHON_EXEC": forked_python()}


def deepspeed(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Without ssh it is started on each node, as it starts itself there by ssh."""
    Path("hosts.txt").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    who = ("--no_ssh", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}")
    path = f"{BESIDE}{os.pathsep}{os.environ['PATH']}"
    command = [forked_python(), "-m", "deepspeed.launcher.runner"]  # as the program `deepspeed` does
    return [*command, "--hostfile=hosts.txt", *who, str(CLI)], {"DS_ACCELERATOR": "cpu", "PATH": path}


def slurm(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What srun gives to a task."""
    tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_NODELIST": "localhost"}
    task = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "MASTER_PORT": str(port)}
    return [forked_python(), str(CLI)], {**tasks, **task, "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "zoo"}


def train_on_two_nodes(
    launcher: Callable, arguments: list[list[str]], folder: Path, cache: Path
) -> tuple[list[int], list[str]]:
    """The exit code and the output of a command on each node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with sitting_at(folder, cache):
        processes = []
        for node in range(2):
            command, environment = launcher(node, port)
            processes.append(
                subprocess.Popen(
                    [*command, *arguments[node]],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [process.communicate(timeout=240)[0] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [(torchrun, "ddp"), (slurm, "zero2"), pytest.param(deepspeed, "zero2", marks=pytest.mark.nightly)],
)
def test_two_nodes_train_as_one(launcher, strategy: str, finished: Path, tmp_path: Path, shared_cache: Path) -> None:
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    overlay = ("--trainer.strategy=ddp",) if strategy == "ddp" else ("--config", "train/cpu_deepspeed.yaml")
    codes, said = train_on_two_nodes(launcher, [[*FIT, *overlay, *NODES, "--run", "nodes"]] * 2, tmp_path, shared_cache)
    assert codes == [0, 0], "\n".join(said)
    [run] = (tmp_path / "runs").iterdir()
    two, one = (json.loads((folder / "results.json").read_text()) for folder in (run, finished / "runs/done"))
    assert (two["devices"], two["tokens_seen"]) == (2, one["tokens_seen"])
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-3)


@pytest.mark.slow
def test_one_of_two_nodes_says_what_it_waits_for(tmp_path: Path, shared_cache: Path):
    with sitting_at(tmp_path, shared_cache):
        process = start(tmp_path, shared_cache, *FIT, "--trainer.strategy=ddp", *NODES, "--run", "nodes", ZOO_RUN="")
        (end := threading.Timer(120, process.kill)).start()  # it would wait for half an hour
        assert process.stdout is not None
        assert "waiting until the run has started on all 2 machines\n" in process.stdout
        end.cancel()
        process.kill()
        process.communicate()
