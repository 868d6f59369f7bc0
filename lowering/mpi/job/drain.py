"""Waits for running XLA programs before MPI is finalized."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from commplan.ending import at_last
from commplan.lowering.mpi.job.engine_errors import reason
from commplan.sidecar import leave
from commplan.wait import until_done

_POLL_S = 0.005  # seconds between two checks whether an array is ready
# The engine, or None, by process id, so that a forked process has no entry.
_engines: dict[int, Any] = {}


def drain(*, this_thread: bool) -> BaseException | None:
    """Wait for dispatched programs.

    Args:
        this_thread: Also wait for programs of this thread whose arrays no longer exist. XLA runs the programs
            of a thread in order.

    Returns:
        The first error among the arrays that were not ready; None if no program failed.
    """
    pending: list[Any] = [array for array in jax.live_arrays() if not array.is_ready()]
    with contextlib.suppress(Exception):
        if this_thread:
            pending.append(mark())
    errors: list[Exception] = []
    for array in pending:
        try:
            until_done(functools.partial(_ready, array))  # JAX's wait ignores Ctrl-C
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001  a failed program has ended, too
            errors.append(error)
    return errors[0] if errors else None


def _ready(array: Any, seconds: float) -> bool:
    """Whether `array` is ready; waits for `seconds`, or for `_POLL_S` if that is shorter."""
    if array.is_ready():
        return True
    time.sleep(min(seconds, _POLL_S))
    return False


def mark() -> Any:
    """An array that is ready once all programs that this thread has dispatched so far have run."""
    return jax.jit(jnp.negative)(jnp.zeros(()))


def at_exit(library: Any) -> None:
    """Drain at exit, and announce the end of this process to other ranks.

    Args:
        library: The engine; None if it is not available.
    """
    if not _engines:
        at_last(_end_programs)
    _engines[os.getpid()] = library


@atexit.register
def _drain() -> None:
    """Wait for programs, and report the failure of one whose result was not used.

    Runs before JAX and mpi4py shut down.
    """
    if os.getpid() not in _engines or MPI.Is_finalized():
        return
    try:
        error = drain(this_thread=True)
    except KeyboardInterrupt:
        leave()
        MPI.COMM_WORLD.Abort(130)
        raise
    if error is not None and (parsed := reason(error)) is not None:
        why = "; ".join((parsed.message, *(note.text for note in parsed.notes)))
        sys.stderr.write(f"commplan: a step that was still running when the process ended failed: {why}\n")


def _end_programs() -> None:
    """Announce the end to the other ranks now: Python may take seconds until MPI is finalized."""
    library = _engines.get(os.getpid())
    if library is not None:
        library.commplan_end_channels()
