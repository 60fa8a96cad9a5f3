"""A process that has imported everything, and makes a child for each line that it reads: a command line without the
seconds that imports take. Started by `fork_server.py`; the children are real processes, which can be killed.

    {"folder": ..., "arguments": [...], "environment": {...}, "log": ...}    → the child's number
    {..., "cpu_seconds": 10, "gigabytes": 2}                                 → the same, and it may use no more
    {"wait": 4711, "seconds": 60}                                            → its exit code, or null if it still runs
    {"usage": 4711, "seconds": 60}       → [exit code, CPU seconds, gigabytes beyond the imports], or null
"""

import json
import os
import resource
import signal
import sys
import time
import traceback


def born(order: dict) -> None:
    """Be the command line."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    if "cpu_seconds" in order:
        resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_seconds"], order["cpu_seconds"] + 1))
        more = data_bytes() + int(order["gigabytes"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (more, more))
    sys.argv = [cli.__file__, *order["arguments"]]
    sys.modules["__main__"].__spec__ = None  # else the processes for other devices would be nurseries
    try:
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:  # before or after what `main` guards
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    # as the interpreter ends: data workers are ended by an exit handler
    import atexit

    atexit._run_exitfuncs()
    os._exit(code)


def data_bytes() -> int:
    """The memory of this process that RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def wait(number: int, seconds: float) -> tuple[int, float, float] | None:
    """The exit code of a child, negative for a signal, its CPU seconds, and its gigabytes beyond the imports."""
    deadline = time.monotonic() + seconds
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while True:
        ended, status, usage = os.wait4(number, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code, usage.ru_utime + usage.ru_stime, (usage.ru_maxrss - imports) / 2**20
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


if __name__ == "__main__":
    import contextlib

    import safetensors.torch  # noqa: F401

    import cli
    import mixers
    import zoo
    import zoo.benchmarks.command_line
    import zoo.scaling.command_line  # noqa: F401

    with contextlib.suppress(ImportError):  # of an extra
        import bokeh.embed  # noqa: F401
    mixers.names()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            ended = wait(order["wait"], order["seconds"])
            answer = None if ended is None else ended[0]
        elif "usage" in order:
            answer = wait(order["usage"], order["seconds"])
        elif not (answer := os.fork()):
            born(order)
        print(json.dumps(answer), flush=True)  # noqa: T201
