"""Servers that are waited for: one that ends without having served tells the workers so."""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

from commplan.diagnostics import fail
from commplan.lowering.mpi.service import why_ending
from commplan.lowering.mpi.typing_shim import MPI
from commplan.protocol.sites import Sites

_expected: list[tuple[Any, Sites]] = []  # communicators of servers that have not served
_over: list[Any] = []  # of those that every worker has left


def expect(comm: Any, sites: Sites) -> None:
    """This process is a server on `comm`."""
    _expected.append((comm, sites))


def attended(comm: Any, name: str) -> None:
    """The server begins to serve. Raises CP0978 where every worker has left it."""
    if any(entry is comm for entry in _over):
        fail(
            "CP0978",
            f"{name} has served, and every worker has left",
            "run.serve() returns once; bind the program again for another job of the same ranks",
        )
    _expected[:] = [entry for entry in _expected if entry[0] is not comm]


def left(comm: Any) -> None:
    """Every worker has left."""
    _over.append(comm)


@atexit.register
def _tell() -> None:
    """Workers would wait for ever for a server whose program ends before it serves."""
    if not _expected or MPI.Is_finalized():
        return
    from commplan.runtime.param_server.mailbox import Post  # noqa: PLC0415  it is not needed else
    from commplan.runtime.param_server.serve import apologize  # noqa: PLC0415
    from commplan.runtime.param_server.store import Pool  # noqa: PLC0415

    why = why_ending() or "its program ended without run.serve()"
    for comm, sites in _expected:
        with contextlib.suppress(MPI.Exception):
            apologize(Post(comm, sites.workers, Pool()), sites, why)
    _expected.clear()
