"""The beginning of commands that run Python as `python -W error` does, but sooner: see `fork_server`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support import fork_server


def words(environment: Mapping[str, str] = os.environ, jax: bool = True) -> list[str]:
    """The beginning of a command, before a file, `-c` or `-m`, in `environment`.

    `jax`: whether the process has JAX imported.
    """
    settings = tuple(sorted(fork_server.read_at_import(environment).items()))
    folder = _served(settings, fork_server.JAX if jax else fork_server.PLAIN)
    return [sys.executable, "-I", "-S", fork_server.__file__, folder]


@functools.cache
def _served(settings: tuple[tuple[str, str], ...], modules: tuple[str, ...]) -> str:
    """Start two servers with those variables and modules; the folder of their sockets."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forks-", ignore_cleanup_errors=True))
    variables = {
        name: value for name, value in os.environ.items() if not fork_server.read_at_import({name: value})
    }
    serve = [sys.executable, "-W", "error", fork_server.__file__, "serve"]
    servers = [
        subprocess.Popen(
            [*serve, str(Path(folder, str(number))), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**variables, **dict(settings)},
            process_group=0,  # a new session would get a separate share of the cores
        )
        for number in range(2)
    ]  # fmt: skip
    for server in servers:
        stack.enter_context(server)  # closes its input, which ends it
        assert server.stdout is not None and server.stdout.readline() == b"listening\n"
    return folder
