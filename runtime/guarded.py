"""Steps without a plan: the implementation of `commplan.guard.jit`, and their machines.

The machines are those of plans, except that collectives are the step's own and the program sets its mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np

from commplan.diagnostics import fail, type_of
from commplan.frontend.bind_axes import is_communicator
from commplan.hang_limits import HangLimits
from commplan.lowering.audit import CompiledCollective
from commplan.recorder.notice import NOTICE_S, Notice
from commplan.runtime.machines import coordinator
from commplan.runtime.machines.gather import Absence, gathered_values
from commplan.runtime.machines.machine import Machine
from commplan.runtime.machines.mesh import MeshMachine, processes_of
from commplan.runtime.observe import watchdog
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.runtime.preflight import preflight
from commplan.wait import check_seconds


class GuardedMesh(MeshMachine):
    """The machine of a step without a plan on the devices of a mesh; see `MeshMachine`."""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context without effect: the program sets its mesh itself."""
        return contextlib.nullcontext()

    def place(self, collective: CompiledCollective) -> str:
        """The program's line without its folder, which may differ between hosts; else as `MeshMachine`."""
        sources = [os.path.basename(origin.source) for origin in collective.origins if origin.source]  # noqa: PTH119
        return sources[0] if sources else super().place(collective)


def machine_of(mesh: Any, comm: Any, name: str, limits: HangLimits, timeout_s: float) -> Machine:
    """Make the machine of a step and start its watchdog.

    All processes of the machine call this with the same arguments, in the same order.

    Args:
        mesh: A `jax.sharding.Mesh`; None for a mesh of all devices. Not used if `comm` is set.
        comm: An mpi4py communicator, or None.
        name: The name of the step, for messages.
        limits: The limits of the watchdog.
        timeout_s: Seconds to wait for the other processes.

    Returns:
        The machine. It has no watchdog if it has one process, or if this process holds no device of `mesh`.

    Raises:
        CommplanError: CP0849 if a process does not arrive; CP0843 or CP0844 for a communicator that cannot
            be used.
    """
    if comm is not None:
        return _ranks(comm, name, limits, timeout_s)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",)) if mesh is None else mesh
    processes = processes_of(mesh)
    machine = GuardedMesh(mesh, dict(mesh.shape))
    if len(processes) == 1 or jax.process_index() not in processes:
        return cast("Machine", machine)
    waits = f"process {jax.process_index()} waits in `guard.jit` of `{name}`"
    notice = Notice([waits], limits.watchdog_s or NOTICE_S)

    fix = "every process calls guard.jit for the same steps in the same order"
    absence = Absence(f"guard `{name}`", fix)

    def exchange(mine: Any) -> Mapping[int, Any]:
        return gathered_values("guard", mine, processes, timeout_s, absence, notice)

    index = int(jax.process_index())
    calls = watchdog.start(index, coordinator.job(), exchange, limits, "")
    return cast("Machine", dataclasses.replace(machine, calls=calls))


def _ranks(comm: Any, name: str, limits: HangLimits, timeout_s: float) -> Machine:
    """Make the machine of a step on the ranks of `comm`; see `machine_of`."""
    from commplan.lowering.mpi.job.rendezvous import Rendezvous  # noqa: PLC0415  MPI only if it is used
    from commplan.lowering.mpi.job.watchdog import job as new_job  # noqa: PLC0415
    from commplan.runtime.machines.communicator import check_communicator  # noqa: PLC0415
    from commplan.runtime.machines.ranks import Ranks  # noqa: PLC0415

    check_communicator(comm, "")
    waits = f"rank {comm.Get_rank()} waits in `guard.jit` of `{name}`"
    notice = Notice([waits], limits.watchdog_s or NOTICE_S, "rank")
    option = "guard.jit(.., timeout=SECONDS)"
    rendezvous = Rendezvous(comm, f"guard `{name}`", timeout_s, option=option, notice=notice)

    # Messages of the comparison go over a duplicate, so they cannot match receives of the program.
    duplicate = rendezvous(comm.Dup)
    ranks = tuple(range(duplicate.Get_size()))

    def exchange(mine: Any) -> Mapping[int, Any]:
        answers: list[Any] = rendezvous(duplicate.allgather, mine)
        return dict(enumerate(answers))

    watched = None
    if len(ranks) > 1:
        job: str = rendezvous(duplicate.bcast, new_job())
        watched = watchdog.start(int(duplicate.Get_rank()), job, exchange, limits, "")
    unwatched = JointCalls()

    # The class is local because its base class imports MPI, which programs on a mesh do not load.
    class GuardedRanks(Ranks):
        """The machine of a step without a plan, whose collectives are mpi4jax's; all ranks take part."""

        @property
        def calls(self) -> Calls | None:
            return watched

        @property
        def joint(self) -> JointCalls:
            return unwatched if watched is None else watched.joint

        def participants(self) -> tuple[int, ...]:
            return ranks

    # The part of a backend that a comparison reads: there are no axes, hence no groups of ranks along them.
    backend = SimpleNamespace(channel=SimpleNamespace(groups=None), sizes={})
    return cast("Machine", GuardedRanks(comm, duplicate, cast("Any", backend)))


def jit(
    function: Callable[..., Any],
    options: dict[str, Any],
    *,
    mesh: Any,
    comm: Any,
    limits: HangLimits,
    timeout: float,
) -> Any:
    """Compile a step that all processes compare before they run it; see `commplan.guard.jit`.

    Args:
        function: The step.
        options: The options of `jax.jit`.
        mesh: A `jax.sharding.Mesh`, or None. If `comm` is None too, a mesh of all devices.
        comm: An mpi4py communicator, or None.
        limits: The limits of the watchdog.
        timeout: Seconds to wait for other processes, here and at each comparison.

    Raises:
        CommplanError: CP0857 for invalid arguments; the errors of `machine_of`.
    """
    if mesh is not None and (comm is not None or is_communicator(mesh)):
        fail(
            "CP0857",
            "guard.jit takes a mesh or a communicator",
            "guard.jit(step, mesh=..) or (step, comm=..)",
        )
    limits.check("CP0857", "guard.jit(step, {})")
    check_seconds("CP0857", "timeout", timeout, file="")
    if not callable(function):
        message = f"guard.jit takes the function of a step, not {type_of(function)}"
        fail("CP0857", message, "guard.jit(step, mesh=..)")
    name = getattr(function, "__name__", type(function).__name__)
    machine = machine_of(mesh, comm, name, limits, timeout)
    if len(machine.participants()) == 1:
        return jax.jit(function, **options)
    step = preflight.ComparedStep(function, options, check_same=False)
    return preflight.jit(machine, step, "", timeout)
