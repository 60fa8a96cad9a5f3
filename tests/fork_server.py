"""The program behind `forked_python.py`: it has imported the project, and forks a process for each request.

Usage: python -m tests.fork_server FD, where FD is a listening socket. It ends when its standard input is closed.

A request is a connection that passes standard input, output and error as file descriptors and sends a line of JSON:

    {"arguments": ["cli.py", "fit", ...], "folder": ..., "environment": {...}}      a script, or -m and a module

The answers are lines of JSON: the process id, and, when the process has ended, its exit code (negative for a signal).
Closing the connection earlier kills the process.
"""

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, NamedTuple


class Child(NamedTuple):
    """A forked process, and the connection of who asked for it."""

    number: int
    connection: socket.socket


def read_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The line of JSON, and the three file descriptors."""
    text, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not text.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            raise ConnectionError("the request is incomplete")
        text += more
    return json.loads(text), streams


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Be the requested process, and end it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, as while an interpreter starts
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may themselves run under nohup
    for stream, source in enumerate(streams):
        os.dup2(source, stream)
        os.close(source)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    is_module = request["arguments"][0] == "-m"
    sys.argv = request["arguments"][is_module:]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(sys.argv[0])))
    code: int | str | None = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int | None) else print(end.code, file=sys.stderr) or 1  # noqa: T201
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    # the rest is how the interpreter ends; exit handlers end data workers
    import atexit

    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def serve(listener: socket.socket) -> None:
    """Answer requests until standard input is closed."""
    children: dict[int, Child] = {}  # by the file descriptor that becomes readable when the process ends
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    for child in children.values():
                        os.kill(child.number, signal.SIGKILL)
                    return
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    try:
                        request, streams = read_request(connection)
                    except (ConnectionError, ValueError):
                        connection.close()
                        continue
                    number = os.fork()
                    if number == 0:
                        selector.close()
                        listener.close()
                        for child in children.values():
                            child.connection.close()
                        connection.close()
                        become(request, streams)
                    for stream in streams:
                        os.close(stream)
                    end = os.pidfd_open(number)
                    children[end] = Child(number, connection)
                    selector.register(end, selectors.EVENT_READ)
                    selector.register(connection, selectors.EVENT_READ, children[end])
                    _send(connection, number)
                elif key.data is None:  # the end of a process
                    child = children.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(child.number, 0)
                    _send(child.connection, os.waitstatus_to_exitcode(status))
                    with suppress(KeyError, ValueError):
                        selector.unregister(child.connection)
                    child.connection.close()
                elif key.data in children.values():  # nobody waits for it any more
                    selector.unregister(key.fileobj)
                    os.kill(key.data.number, signal.SIGKILL)


def _send(connection: socket.socket, answer: Any) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def import_everything() -> None:
    """Import what command lines import, also what they import where it is needed."""
    import contextlib
    import io

    import torch
    import torchmetrics  # noqa: F401

    import mixers
    import zoo
    from zoo import config as configs
    from zoo.display import new_figure

    if not os.path.exists("/dev/nvidiactl"):  # a process cannot use a GPU that the one it was forked from has opened
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
        with contextlib.suppress(ImportError):  # it imports PyTorch's compiler when it makes an optimiser
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        del os.environ["DS_ACCELERATOR"]
    mixers.names()
    for name in zoo.__all__:  # modules that are imported when a function is first used
        getattr(zoo, name)
    new_figure(1, 1).savefig(io.BytesIO())  # fonts
    config = configs.read("gdn_h2.yaml")  # parsers are made once per process
    configs.to_dict(config)
    config.model.vocab_size = 512
    with torch.random.fork_rng(devices=[]):  # by default it initialises CUDA, which a forked process cannot do again
        configs.from_config(config, "meta")
        for key in configs.GROUPS:
            if key != "model":
                configs.instantiate(key, config)
    assert not torch.cuda.is_initialized(), "an import initialises CUDA, so no forked process could use a GPU"


if __name__ == "__main__":
    sys.executable = os.environ.pop("FORKED_PYTHON")  # processes that are started there are forked from here, too
    import_everything()
    sys.modules["__main__"].__spec__ = None  # else the processes for other devices would be fork servers
    gc.freeze()  # so that collections in a child do not copy all pages
    with socket.socket(fileno=int(sys.argv[1])) as server:
        serve(server)
