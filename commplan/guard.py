"""A watched `jax.jit` for programs without a plan. `commplan.runtime.guarded` implements it.

train = commplan.guard.jit(step, mesh=mesh)    # under jax.distributed
train = commplan.guard.jit(step, comm=comm)    # under MPI, with collectives of mpi4jax
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from commplan.hang_limits import BUSY_S, HangLimits, OnHang
from commplan.tracebacks import ends_at_caller


@ends_at_caller
def jit(
    function: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    comm: Any = None,
    watchdog_s: float | None = 10.0,
    busy_s: float = BUSY_S,
    on_hang: OnHang = "abort",
    timeout: float = 1800.0,
    **options: Any,
) -> Any:
    """`jax.jit` of a step that several processes run together, compared and watched.

    Before a call for new shapes, all processes compare their arguments, programs and collectives, and refuse
    steps that would wait for ever. If a step does not end, the report names the process that died, is
    stopped, is busy, or calls steps in another order, and the source lines of the step's collectives. All
    processes must make the same call, after `jax.distributed.initialize`. With one process it is `jax.jit`.

    Args:
        function: the step; without it, a decorator is returned.
        mesh: the mesh of the step; by default all devices.
        comm: an `mpi4py` communicator whose ranks run the step, instead of a mesh.
        watchdog_s: seconds without progress before a process is reported; None: the step is not watched.
        busy_s: seconds before the waiting processes end if the reported process is alive and busy with other
            work; see `late`.
        on_hang: `abort` ends the waiting processes. `report` only prints the blocking process, and continues
            to wait.
        timeout: seconds to wait for another process, which may be compiling, when processes compare steps.
        **options: the options of `jax.jit`.

    Returns:
        A function that is called like `jax.jit(function)`, or a decorator if `function` is None.

    Raises:
        CommplanError: CP0849 if a process does not arrive; CP0857 for invalid arguments. Calls of the step
            raise CP0854 if steps differ, and CP0855 if a process does not arrive at a comparison.
    """
    limits = HangLimits(watchdog_s, busy_s, on_hang)
    if function is None:
        return functools.partial(jit, mesh=mesh, comm=comm, timeout=timeout, **limits._asdict(), **options)
    from commplan.runtime.guarded import jit as guarded  # noqa: PLC0415  jax is loaded only here

    return guarded(function, options, mesh=mesh, comm=comm, limits=limits, timeout=timeout)


@contextmanager
def late() -> Generator[None]:
    """Context that announces that this process is late on purpose, such as to write a checkpoint.

    Inside the `with` block, other processes wait for it without a limit and report nothing.
    """
    from commplan.lowering.mpi.job.watchdog import expected_late  # noqa: PLC0415

    with expected_late():
        yield
