"""A stand-in for the Python interpreter that runs a script without the seconds that imports take.

`forked_python()` is the path of an executable. It runs `[forked_python(), "cli.py", …]` in a process that is forked
from one which has imported the project (`fork_server.py`). It passes signals on to that process, and ends with the same
exit code or signal. A program that is to be started afresh is started with `sys.executable`.
"""

import atexit
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAND_IN = """\
#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
script = next((argument for argument in arguments if argument != "-u"), "-")
# others are programs of multiprocessing and compilers, which inherit files, and what kills look for in /proc
forked = script == "-m" or (script.endswith(".py") and "site-packages" not in script)
if not forked or os.environ.get("FRESH_PYTHON"):
    os.execv("{python}", ["{python}", *arguments])
del arguments[: arguments.index(script)]
if os.environ.get("ZOO_PARENT"):  # zoo.train.signals: the forked process is not a child of that parent, but this one is
    import ctypes

    number = signal.SIGTERM if os.environ.get("LOCAL_RANK", "0") == "0" else signal.SIGKILL
    ctypes.CDLL(None).prctl(1, int(number))
process, early = None, []


def pass_on(number, frame):
    if process is None:
        early.append(number)
    else:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
        signal.signal(number, pass_on)
server = socket.socket(socket.AF_UNIX)
server.connect("{server}")
request = {{"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}}
text = json.dumps(request).encode() + b"\\n"
sent = socket.send_fds(server, [text], [0, 1, 2])
server.sendall(text[sent:])
answers = server.makefile("r")
process = json.loads(answers.readline())
for number in early:
    pass_on(number, None)
code = json.loads(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
# in the server's environment, since libraries read it when they are imported
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}
SETTINGS["TRITON_INTERPRET"] = "0"  # that of these tests is for their own process


class ForkServer:
    """A process that has imported the project, and programs forked from it."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fork-server-"))  # a short path, as sockets need
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._address = folder / "socket"
        self.executable = folder / "python"
        self.executable.write_text(STAND_IN.format(python=sys.executable, server=self._address))
        self.executable.chmod(0o755)
        self._connections: dict[int, tuple[socket.socket, Any]] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._address))
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.fork_server", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                cwd=folder,
                env={
                    **os.environ,
                    **SETTINGS,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                    "ZOO_RUN": "",
                    "ZOO_PARENT": "",
                    "FORKED_PYTHON": str(self.executable),
                },
            )

    def start(self, arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> int:
        """Start a program, in a session of its own.

        Args:
            arguments: What follows `python`: a script and its arguments.
            folder: Its working directory.
            environment: Variables to set in addition to those of this process.
            log: The file that output and errors are appended to.

        Returns:
            Its process id.
        """
        settings = {**SETTINGS, "COLUMNS": "200", "ZOO_RUN": "", "ZOO_PARENT": "", "DS_ACCELERATOR": "cpu"}
        settings["FRESH_PYTHON"] = "1"  # for the processes that it starts, which are then found in /proc
        request = {
            "arguments": [*map(str, arguments)],
            "folder": str(folder),
            "environment": {**os.environ, **settings, **environment},
        }
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._address))
        text = json.dumps(request).encode() + b"\n"
        with open(os.devnull) as nothing, log.open("ab") as output:
            sent = socket.send_fds(connection, [text], [nothing.fileno(), output.fileno(), output.fileno()])
        connection.sendall(text[sent:])
        answers = connection.makefile("rb", buffering=0)
        number = json.loads(answers.readline())
        self._connections[number] = connection, answers
        return number

    def wait(self, number: int, seconds: float) -> int | None:
        """The exit code of a process, negative for a signal; None if it still runs after some seconds."""
        connection, answers = self._connections[number]
        connection.settimeout(seconds)
        try:
            code: int = json.loads(answers.readline())
        except TimeoutError:
            self._connections[number] = connection, connection.makefile("rb", buffering=0)
            return None
        del self._connections[number]
        connection.close()
        return code

    def close(self) -> None:
        """End the server, and kill what it has started and still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # a data worker that was forked from here holds the pipe
            self._process.kill()
            self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """The fork server of this process, started when it is first needed."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def forked_python() -> str:
    """The stand-in for `sys.executable`; where processes cannot be forked so (not Linux), the interpreter itself."""
    return str(fork_server().executable) if hasattr(os, "pidfd_open") else sys.executable
