"""Python processes of tests that skip importing commplan or JAX: they are forked from one that has.

Imports take two thirds of the processor time of a job of three ranks, and more without JAX.
`interpreter.words` begins a command that replaces `python -W error`: a small client, which lives as long as
the process that a server forks for it. It passes on its descriptors, its working directory, its environment
and signals, and it ends with the status of that process. The servers end with the process that runs the
tests.

The modules are imported and the grammar of plans is built, but JAX has no backend yet, and MPI, which starts
when it is imported, is not loaded. There are two servers with different hash seeds; otherwise all ranks of a
job would iterate over sets in the same order. If the environment differs from that of its server (variables
of JAX, XLA or Python; a preloaded library) the client becomes the interpreter itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import NoReturn

PLAIN = ("commplan.api", "commplan.dsl.parser", "commplan.runtime.input", "commplan.runtime.input.iterator")
JAX = (
    *PLAIN,
    "jax",
    "jax.extend",
    "commplan.lowering.jax.backend",
    "commplan.lowering.programs",
    "commplan.runtime.run",
)
TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  see `main`
# Variables that imports read: of a process that is forked they are those of its server.
READ_AT_IMPORT = (
    "JAX_",
    "XLA_",
    "TF_",
    "PYTHON",
    "LD_PRELOAD",
    "OMP_",
    "OPENBLAS_",
    "COVERAGE",
    "COMMPLAN_TRACEBACK",
)
# Of these, a forked process has the values of its client.
OPTIONS = {"JAX_NUM_CPU_DEVICES": -1, "JAX_DISABLE_MOST_OPTIMIZATIONS": False}
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
             signal.SIGCONT)  # fmt: skip
MOST = 1 << 20  # bytes of a request


def read_at_import(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that must be those of the server; of PYTHONPATH, the folders apart from `tests`."""
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name not in ("PYTHONHASHSEED", *OPTIONS)
    }
    if paths := [
        path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", TESTS)
    ]:
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


# The client: it imports nothing but the standard library.


def main(folder: str, program: list[str]) -> NoReturn:
    """Have `program` run by a server in `folder`, and end as it does."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.getpid())
    path = os.path.join(folder, str(int(rank) % 2))  # noqa: PTH118  the client imports as little as it can
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(path)
        fits = json.loads(server.recv(MOST)) == read_at_import()
    except (OSError, ValueError):
        fits = False
    if not fits:
        os.execv(sys.executable, [sys.executable, "-W", "error", *program])
    request = {"program": program, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            server.send(str(number).encode())

    for number in FORWARDED:
        signal.signal(number, forward)
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    end_as(int(server.recv(MOST) or -signal.SIGKILL))


def end_as(status: int) -> NoReturn:
    if status < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# The server.


def serve(path: str, settings: bytes) -> list[str]:
    """Fork a process for each client, until the standard input closes; returns in those, with their program.

    `settings`: the environment that this server has read at import, as JSON.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("listening", flush=True)
    ended, woken = socket.socketpair()
    woken.setblocking(False)
    handlers = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, _wake)}
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    clients: dict[int, socket.socket] = {}  # by the process that runs for them
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    for each in (listener, ended):
        waiting.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj == 0:
                for process in clients:
                    os.kill(process, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj is ended:
                ended.recv(MOST)
                _reap(clients, waiting)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                with contextlib.suppress(OSError):
                    client.send(settings)
                waiting.register(client, selectors.EVENT_READ)
            elif isinstance(client := key.fileobj, socket.socket) and client in waiting.get_map():
                process = next((process for process, of in clients.items() if of is client), None)
                if process is not None:
                    _forward(client, process, waiting)
                    continue
                words, descriptors = _request(client)
                if not words:
                    waiting.unregister(client)
                    client.close()
                elif forked := os.fork():
                    clients[forked] = client
                    for descriptor in descriptors:
                        os.close(descriptor)
                else:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, handlers[signal.SIGCHLD])
                    connections = [key.fileobj for key in waiting.get_map().values()]
                    waiting.close()
                    for each in (*connections, woken, *clients.values()):
                        if isinstance(each, socket.socket):
                            each.close()
                    return _become(json.loads(words), descriptors)


def _request(client: socket.socket) -> tuple[bytes, list[int]]:
    """A client's request, and its descriptors; empty if it is gone."""
    try:
        words, descriptors, _, _ = socket.recv_fds(client, MOST, 3)
    except OSError:
        return b"", []
    return words, descriptors


def _wake(_number: int, _frame: FrameType | None) -> None:
    """A handler in Python, without which nothing is written to the descriptor that wakes the server."""


def _reap(clients: dict[int, socket.socket], waiting: selectors.BaseSelector) -> None:
    """Send the exit status of processes to their clients."""
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            client = clients.pop(process)
            with contextlib.suppress(OSError):
                client.send(str(os.waitstatus_to_exitcode(status)).encode())
            if client in waiting.get_map():
                waiting.unregister(client)
            client.close()


def _forward(client: socket.socket, process: int, waiting: selectors.BaseSelector) -> None:
    """Pass a signal on; a client that has vanished was killed."""
    try:
        number = int(client.recv(MOST) or 0)
    except OSError:
        number = 0
    if not number:
        waiting.unregister(client)
    os.kill(process, number or signal.SIGKILL)


def _become(request: dict[str, object], descriptors: list[int]) -> list[str]:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    environment, folder, program = (request[name] for name in ("environment", "folder", "program"))
    assert isinstance(environment, dict) and isinstance(program, list)
    # Streams remember their target.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(folder))
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    # A process that a program forks has no sidecar; one that stands for an interpreter has.
    if "commplan.sidecar.attend" in sys.modules:
        sys.modules["commplan.sidecar.attend"]._exempt.clear()
    if "jax" in sys.modules:
        for name, usual in OPTIONS.items():
            sys.modules["jax"].config.update(name.lower(), type(usual)(int(environment.get(name, usual))))
    return [str(word) for word in program]


def run(program: list[str]) -> None:
    """As the interpreter would: `-c TEXT`, `-m MODULE` or a file, and arguments."""
    import linecache  # noqa: PLC0415
    import runpy  # noqa: PLC0415

    if program[0] == "-m":
        sys.argv, sys.path[0] = program[1:], os.getcwd()  # noqa: PTH109
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # pyright: ignore
        return
    module = ModuleType("__main__")
    if program[0] == "-c":
        sys.argv, sys.path[0], name, text = ["-c", *program[2:]], "", "<string>", program[1]
    else:
        sys.argv, name = program, program[0]
        sys.path[0] = os.path.dirname(os.path.realpath(name))  # noqa: PTH120
        module.__file__ = os.path.abspath(name)  # noqa: PTH100
        with open(name, encoding="utf-8") as file:  # noqa: PTH123
            text = file.read()
    linecache.clearcache()
    sys.modules["__main__"] = module
    exec(compile(text, name, "exec"), module.__dict__)


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        main(sys.argv[1], sys.argv[2:])
    import gc
    import importlib

    read = json.dumps(read_at_import()).encode()  # before JAX adds to it
    for module_name in sys.argv[3:]:
        importlib.import_module(module_name)
    sys.modules["commplan"].loads("plan p\naxis data = 1")
    gc.collect()
    gc.freeze()  # forked processes neither go through it again nor copy it
    run(serve(sys.argv[2], read))
