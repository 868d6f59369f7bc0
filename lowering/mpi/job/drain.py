"""Waits for programs that XLA is still running before MPI is finalized."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from typing import Any

from commplan.ending import at_last
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.mpi.job.engine_errors import reason
from commplan.lowering.mpi.typing_shim import MPI
from commplan.sidecar import leave
from commplan.wait import attended

_POLL_S = 0.005
_engines: dict[int, Any] = {}  # of the process that has called `at_exit`: a forked one has none to end


def drain(*, own: bool) -> BaseException | None:
    """Wait for what has been dispatched; the first error of what was still under way.

    own: also for what no array is left of, if this thread has dispatched it: XLA runs its programs in order.
    """
    pending: list[Any] = [array for array in jax.live_arrays() if not array.is_ready()]
    with contextlib.suppress(Exception):
        if own:
            pending.append(mark())
    errors: list[Exception] = []
    for array in pending:
        try:
            attended(functools.partial(_ready, array))  # JAX's own wait lets no Ctrl-C in
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001  what failed has ended, too
            errors.append(error)
    return errors[0] if errors else None


def _ready(array: Any, seconds: float) -> bool:
    if array.is_ready():
        return True
    time.sleep(min(seconds, _POLL_S))
    return False


def mark() -> Any:
    """An array that is ready when all that this thread has dispatched so far has run."""
    return jax.jit(jnp.negative)(jnp.zeros(()))


def at_exit(library: Any) -> None:
    """Drain when this process ends, and say at last that it does. library: the engine, or None."""
    if not _engines:
        at_last(_end_programs)
    _engines[os.getpid()] = library


@atexit.register
def _drain() -> None:
    """Runs before JAX and mpi4py shut down: reports the failure of a step whose result was never awaited."""
    if os.getpid() not in _engines or MPI.Is_finalized():
        return
    try:
        error = drain(own=True)
    except KeyboardInterrupt:
        leave()
        MPI.COMM_WORLD.Abort(130)
        raise
    if error is not None and (parsed := reason(error)) is not None:
        why = "; ".join((parsed.message, *(note.text for note in parsed.notes)))
        sys.stderr.write(f"commplan: when this process ended a step was under way, and failed: {why}\n")


def _end_programs() -> None:
    """The other ranks are told that nothing more comes: Python may take seconds from here until MPI ends."""
    library = _engines.get(os.getpid())
    if library is not None:
        library.commplan_end_channels()
