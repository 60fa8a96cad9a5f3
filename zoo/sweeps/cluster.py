"""Running a sweep as jobs on a cluster, through submitit."""

import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from kernels import UserError
from zoo.files.sealed_json import read_sealed, write_sealed
from zoo.sweeps.plan import Run
from zoo.sweeps.runner import Failure, Runner, result

POLL_SECONDS = 2.0


def run_on_cluster(runner: Runner, runs: Sequence[Run], cluster: str, options: dict[str, Any]) -> list[Failure]:
    """Submit each incomplete run to a cluster, and wait for all of them.

    If the wait is interrupted (Ctrl-C), jobs stay in the queue, and the next call waits for them instead of submitting
    them again.

    Args:
        runner: Has the folder of the runs and the command that starts them.
        runs: The runs of the sweep.
        cluster: submitit's name of the executor: `slurm`, or `local` for processes on this machine.

    Returns:
        The runs that failed.
        options: submitit's parameters, such as `{"slurm_partition": "gpu", "gpus_per_node": 1, "timeout_min": 120}`.

    Raises:
        UserError: submitit is not installed, or does not know the cluster or an option.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("cluster: needs submitit; pip install 'token-mixer-zoo[cluster]'") from None
    logs, file = runner.folder / "jobs", runner.folder / "jobs.json"
    with runner.claimed(runs):
        try:
            executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
            executor.update_parameters(name="sweep", **options)
        except (ValueError, NameError, RuntimeError, AssertionError, TypeError) as error:
            raise UserError(f"cluster: {cluster} with {options}: {' '.join(str(error).split())}") from None
        advice = "delete it if no job of this sweep is in the queue any more"
        earlier: dict[str, str] = read_sealed(file, required=False, advice=advice) if file.is_file() else {}
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
            jobs[run.name] = executor.submit(submitit.helpers.CommandFunction(runner.prepare(run), verbose=False))
            earlier[run.name] = jobs[run.name].job_id
            write_sealed(file, earlier)
        with tqdm(total=len(runs), initial=len(runs) - len(jobs), desc="runs", unit=" runs", dynamic_ncols=True) as bar:
            waiting = dict(jobs)
            while waiting:
                time.sleep(POLL_SECONDS)
                for name in [name for name, job in waiting.items() if job.done()]:
                    del waiting[name]
                    bar.update()
    return [
        Failure(name, f"job {job.job_id} {job.state.lower()}, see {job.paths.stderr}")
        for name, job in jobs.items()
        if result(runner.folder / name) is None
    ]
