"""Send an abort message to the workers if a server process ends without serving.

`bind` calls `expect_serving`, and `serve` calls `begin_serving` and `end_serving`.
"""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

from mpi4py import MPI

from commplan.diagnostics import fail
from commplan.lowering.mpi.service import exception_text
from commplan.protocol.sites import Sites

_expected: list[tuple[Any, Sites]] = []  # The communicators of servers that have not begun to serve.
_finished: list[Any] = []  # The communicators of servers that all workers have left.


def expect_serving(comm: Any, sites: Sites) -> None:
    """Register this process as a server on `comm`, a communicator of workers and servers."""
    _expected.append((comm, sites))


def begin_serving(comm: Any, name: str) -> None:
    """Mark that the server `name` begins to serve. Raises CP0978 if all workers have already left it."""
    if any(entry is comm for entry in _finished):
        fail(
            "CP0978",
            f"{name} has already served, and all workers have left",
            "run.serve() returns once; bind the program again for another job on the same ranks",
        )
    _expected[:] = [entry for entry in _expected if entry[0] is not comm]


def end_serving(comm: Any) -> None:
    """Mark that all workers have left."""
    _finished.append(comm)


@atexit.register
def _abort_workers() -> None:
    """Send the reason at exit: workers would wait forever for a server that ends before it serves."""
    if not _expected or MPI.Is_finalized():
        return
    from commplan.runtime.param_server.mailbox import Mailbox  # noqa: PLC0415  rarely needed
    from commplan.runtime.param_server.serve import send_abort  # noqa: PLC0415
    from commplan.runtime.param_server.store import Pool  # noqa: PLC0415

    reason = exception_text() or "its program ended without run.serve()"
    for comm, sites in _expected:
        with contextlib.suppress(MPI.Exception):
            send_abort(Mailbox(comm, sites.workers, Pool()), sites, reason)
    _expected.clear()
