"""Checks of a communicator: its state, its threads, and its number of ranks.

`check_communicator` and `check_size` run at `bind`. `sizes_of` runs at `compile`, for an axis with size `?`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpi4py import MPI

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import Plan
from commplan.ir.types import AxisKind


def check_communicator(comm: Any, file: str) -> None:
    """Raise CP0843 for a communicator that cannot be used, and CP0844 for too few MPI threads."""
    expected = "expected a communicator such as mpi4py.MPI.COMM_WORLD"
    if MPI.Is_finalized() or not MPI.Is_initialized():
        state = "has been finalized" if MPI.Is_finalized() else "is not initialized"
        fail("CP0843", f"MPI {state}", "bind programs after MPI_Init and before MPI_Finalize", file=file)
    if comm == MPI.COMM_NULL:
        fail("CP0843", "the communicator is null: it was freed, or never created", expected, file=file)
    if comm.Is_inter():
        fail("CP0843", "an inter-communicator has two groups of ranks", expected, file=file)
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {
            MPI.THREAD_SINGLE: "SINGLE",
            MPI.THREAD_FUNNELED: "FUNNELED",
            MPI.THREAD_SERIALIZED: "SERIALIZED",
        }
        fail(
            "CP0844",
            f"MPI was initialized for MPI_THREAD_{names[level]}, but phases call it from JAX's threads",
            "mpi4py requests MPI_THREAD_MULTIPLE by default: set mpi4py.rc.thread_level to `multiple`",
            file=file,
        )


def check_size(schedule: ir.Schedule, comm: Any) -> None:
    """Raise CP0840 if `comm` has another number of ranks than the plan's axes and servers need."""
    sizes, actual = schedule.mesh_sizes, comm.Get_size()
    servers = {axis.name: axis.size for axis in schedule.axes if axis.kind is AxisKind.SERVER}
    expected = math.prod(sizes.values()) + sum(servers.values())
    if expected == actual:
        return
    workers = str(math.prod(sizes.values()))
    fail(
        "CP0840",
        f"the plan has {expected} ranks, but the communicator has {actual}",
        *_made_of(workers, sizes, servers, "no axes"),
        f"start it with mpirun -n {expected}, or split the communicator",
        file=schedule.file,
    )


def _made_of(
    workers: str, sizes: Mapping[str, int], servers: Mapping[str, int], none: str
) -> tuple[str, ...]:
    """Notes that list the ranks of a plan.

    Args:
        workers: The number of workers, or a description of it.
        sizes: The sizes of the plan's axes.
        servers: The number of ranks of each kind of server; empty for a plan without servers.
        none: The text for a plan without axes.
    """
    axes = " x ".join(f"{name} = {size}" for name, size in sizes.items()) or none
    if not servers:
        return (f"its axes: {axes}",)
    named = ", ".join(f"{name} = {size}" for name, size in servers.items())
    after = f"ranks for its servers, after the workers: {sum(servers.values())} ({named})"
    return f"ranks for its workers: {workers} ({axes})", after


def sizes_of(plan: Plan, comm: Any, passed: Mapping[str, int]) -> dict[str, int]:
    """Add the size of the one axis that is declared `?` to the sizes of a plan.

    The axis gets the ranks that remain. Servers have their own ranks, after all others.

    Args:
        plan: The plan.
        comm: An mpi4py communicator.
        passed: The sizes that the user passes, by axis. They take precedence over those of the plan.

    Returns:
        `passed`, with the size of the axis that has none. If several axes have none, or a size is wrong,
        `passed` alone: the compiler reports them.

    Raises:
        CommplanError: CP0840 if the sizes do not fit the ranks of `comm`; CP0843 or CP0844 if the
            communicator cannot be used.
    """
    check_communicator(comm, plan.file)
    count = int(comm.Get_size())
    sizes = dict(passed)
    fixed: dict[str, int] = {}
    unknown: list[str] = []
    servers: dict[str, int] = {}
    for axis in plan.axes:
        size = sizes.get(axis.name, axis.size)
        if axis.kind is AxisKind.SERVER:
            # The compiler reports a wrong size. Until then a server has one rank.
            servers[axis.name] = size if type(size) is int and size > 0 else 1
            continue
        if size is None:
            unknown.append(axis.name)
        else:
            fixed[axis.name] = size
    are_valid = all(type(size) is int and size > 0 for size in fixed.values())
    if len(unknown) > 1 or not are_valid:
        return sizes  # The compiler reports each of them.

    product, serving = math.prod(fixed.values()), sum(servers.values())
    workers = count - serving
    if unknown and workers > 0 and workers % product == 0:
        return sizes | {unknown[0]: workers // product}
    if product != workers or unknown:
        more = f" and {serving} for servers" if serving and unknown else ""
        needed = f"a multiple of {product}" if unknown else str(product + serving)
        many = f"a multiple of {product}" if unknown else f"{product}"
        fail(
            "CP0840",
            f"the plan needs {needed} ranks{more}, but the communicator has {count}",
            *_made_of(many, fixed, servers, "no axes of known size"),
            f"start {needed}{more}: mpirun -n {product + serving}; or split the communicator",
            file=plan.file,
        )
    return sizes
