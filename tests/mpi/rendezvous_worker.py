"""A rank of three, of which rank 1 never arrives: rendezvous_worker.py WHERE HOW."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

from mpi4py import MPI
from support import host_processes

import commplan
from commplan.cost.calibration import Calibration
from commplan.diagnostics import CommplanError
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.recorder.processes import process_state
from commplan.runtime.calibrate import mpi as measured
from commplan.runtime.calibrate.calibrate import calibrate
from commplan.runtime.input.device.batches import shared_group
from commplan.runtime.machines import ranks
from commplan.runtime.rehearse.mpi import World
from commplan.topology import Level, Topology

TIMEOUT_S, NOTICE_S, LIFE_S = 3.0, 2.0, 240
PLAN = """
plan p
axis data = 3
input grads : f32[64] partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
comm = MPI.COMM_WORLD
ABSENT = comm.bcast(os.getpid(), 1)
where, how = sys.argv[1:]
signal.alarm(LIFE_S)  # a stopped rank may outlive its job, and waits on once it is continued


def stay_away() -> None:
    """The behavior of rank 1 instead of arriving; if it stops, the others arrive after that."""
    if comm.rank != 1:
        while how == "stop" and process_state(ABSENT) != "stopped":
            time.sleep(0.05)
        return
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(TIMEOUT_S + 1 if how == "late" else 600)


def bind() -> None:
    plan = commplan.loads(PLAN).compile(comm)
    stay_away()
    plan.bind(comm, timeout=60 if how == "late" else TIMEOUT_S, watchdog_s=NOTICE_S)


def guard() -> None:
    stay_away()
    commplan.guard.jit(lambda x: x, comm=comm, timeout=60, watchdog_s=NOTICE_S)


def inside() -> None:
    """Rank 1 reaches bind, and stops when it has a duplicate of the communicator."""
    plan = commplan.loads(PLAN).compile(comm)
    call = Rendezvous.__call__
    calls: list[str] = []

    def counted(self: Rendezvous, *arguments):
        calls.append("")
        if len(calls) == 3:
            self.timeout_s = TIMEOUT_S
            stay_away()
        return call(self, *arguments)

    kind: Any = Rendezvous
    kind.__call__ = counted
    plan.bind(comm, timeout=LIFE_S)


def compile_on_hosts() -> None:
    stay_away()
    machine = Topology("t", (Level("process", 3, 1e-6, 1e9),))
    ranks.NOTICE_S = NOTICE_S
    commplan.loads(PLAN).compile(comm, topology=machine, timeout=60 if how == "late" else TIMEOUT_S)


def batches() -> None:
    run, _ = host_processes.bound("all_shared", comm.size, comm)
    phase = run.program.schedule.phase("step")
    stay_away()
    shared_group(run.context, phase, run.context.machine.input.local(), timeout=TIMEOUT_S)


def calibration() -> Calibration:
    fabric = measured.MpiFabric()
    barrier = fabric.barrier
    calls: list[str] = []

    def counted() -> None:
        calls.append("")
        if len(calls) == 60:
            fabric.rendezvous.timeout_s = TIMEOUT_S
            stay_away()
        barrier()

    fabric.barrier = counted  # pyright: ignore[reportAttributeAccessIssue]
    return fabric.rendezvous(lambda: calibrate(fabric, seconds=2, largest=2**12))


def rehearsal() -> None:
    world = World()
    world._rendezvous.timeout_s = TIMEOUT_S  # pyright: ignore[reportPrivateUsage]
    stay_away()
    world.agree()


try:
    {
        "bind": bind, "inside": inside, "guard": guard, "compile": compile_on_hosts, "batches": batches,
        "calibrate": calibration, "rehearse": rehearsal,
    }[where]()  # fmt: skip
    print(f"rank {comm.rank} is done", flush=True)
except CommplanError as error:
    print(f"rank {comm.rank} raised {error}", flush=True)
    if how == "caught":
        with contextlib.suppress(SystemExit):
            sys.exit(0)
    else:
        raise
