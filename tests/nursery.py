"""A process that has imported everything, and makes a child for each line that it reads: a command line without the
seconds that imports take. Started by `test_kills.py`; the children are real processes, which can be killed.

    {"folder": ..., "arguments": [...], "environment": {...}, "log": ...}    → the child's number
    {"wait": 4711, "seconds": 60}                                            → its exit code, or null if it still runs
"""

import json
import os
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


def wait(number: int, seconds: float) -> int | None:
    """The exit code of a child, negative for a signal."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


if __name__ == "__main__":
    import cli

    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = wait(order["wait"], order["seconds"])
        elif not (answer := os.fork()):
            born(order)
        print(json.dumps(answer), flush=True)  # noqa: T201
