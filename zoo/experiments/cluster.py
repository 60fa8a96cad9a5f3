"""Running a sweep as jobs on a cluster, through submitit."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.experiments.definition import Run
from zoo.experiments.runner import Failure, Runner, result, run_bar
from zoo.files.sealed_json import read_sealed, write_sealed
from zoo.train.signals import interrupt_deferred

POLL_SECONDS = 2.0


def run_on_cluster(runner: Runner, runs: Sequence[Run], cluster: str, options: dict[str, Any]) -> list[Failure]:
    """Submit each incomplete run to a cluster, wait for all of them, and return those that failed.

    If the wait is interrupted (Ctrl-C), jobs stay in the queue, and the next call waits for them instead of submitting
    them again.

    Args:
        runner: Has the folder of the runs and the command that starts them.
        runs: The runs of the sweep.
        cluster: submitit's name of the executor: `slurm`, or in tests `local`.
        options: submitit's parameters, such as `{"slurm_partition": "gpu", "gpus_per_node": 1, "timeout_min": 120}`.

    Raises:
        UserError: submitit is not installed, or does not know the cluster or an option.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("cluster: needs submitit; pip install 'token-mixer-zoo[cluster]'") from None
    logs, file = runner.folder / "jobs", runner.folder / "jobs.json"
    if logs.is_symlink():
        raise UserError(f"folder: {logs} is a link, through which nothing is written; put a folder in its place")
    with runner.claimed(runs):
        try:
            executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
            executor.update_parameters(name="sweep", **options)
        except (ValueError, NameError, RuntimeError, AssertionError, TypeError) as error:
            raise UserError(f"cluster: {cluster} with {options}: {' '.join(str(error).split())}") from None
        earlier = _recorded(file)
        classes = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}
        jobs: dict[str, submitit.Job[Any]] = {}
        for run in runs:
            if result(runner.folder / run.name) is not None:
                continue
            if run.name in earlier and cluster in classes:
                job = classes[cluster](logs, earlier[run.name])
                if not job.done():
                    jobs[run.name] = job
                    continue
                if result(runner.folder / run.name) is not None:  # it has ended in the meantime
                    continue
            command = submitit.helpers.CommandFunction(runner.prepare(run), verbose=False)
            with interrupt_deferred():  # a job that is not recorded would be submitted again
                jobs[run.name] = executor.submit(command)
                earlier[run.name] = jobs[run.name].job_id
                write_sealed(file, earlier)
        with run_bar(runner.folder, len(runs), len(runs) - len(jobs)) as bar:
            waiting = set(jobs)
            while waiting:
                time.sleep(POLL_SECONDS)
                ended = {name for name in waiting if jobs[name].done()}
                waiting -= ended
                bar.update(len(ended))
    return [
        Failure(name, f"job {job.job_id} {job.state.lower()}, see {job.paths.stderr}")
        for name, job in jobs.items()
        if result(runner.folder / name) is None
    ]


def _recorded(file: Path) -> dict[str, str]:
    """The job of each run that an earlier call has submitted."""
    advice = "delete it if no job of this sweep is in the queue any more"
    jobs = read_sealed(file, advice=advice) if os.path.lexists(file) else {}
    for run, job in jobs.items():
        if not isinstance(job, str) or not re.fullmatch(r"\d+(_\d+)?", job):  # also part of the names of files
            raise UserError(f"{file} is damaged (the job of {run} is {job!r}); {advice}.")
    return jobs
