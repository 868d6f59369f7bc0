"""The machine and the pytree structures of a bound program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from commplan.lowering.jax.pytree import Structure, flatten
from commplan.mesh_kind import is_communicator
from commplan.runtime.machines.machine import BindRequest, Machine
from commplan.runtime.machines.mesh import check_mesh, check_processes, machine_of
from commplan.runtime.machines.server import check_servers

if TYPE_CHECKING:
    from commplan.api import Program


def machine_for(request: BindRequest, mesh: Any) -> Machine:
    """The machine of `mesh`: a mesh of devices, or the ranks of an `mpi4py` communicator.

    Raises:
        CommplanError: the errors of `request`; CP0801, CP0802, CP0845 or CP0849 for a mesh that does not fit;
            CP0840 to CP0849 for a communicator that does not fit.
    """
    if is_communicator(mesh):
        from commplan.runtime.machines.ranks import ranks  # noqa: PLC0415  Only programs under MPI load MPI.

        return cast("Machine", ranks(request, mesh))
    check_mesh(request.schedule, mesh)
    check_servers(request.schedule)
    return machine_of(request.schedule, mesh, check_processes(request, mesh))


def known_structures(program: Program[Any]) -> dict[tuple[str, ...], Structure]:
    """The pytree structures of the program's compile-time shapes, by the paths of their leaves."""
    structures: dict[tuple[str, ...], Structure] = {}
    for tree in program.structures.values():
        paths, flat = flatten(tree, _is_shape)
        structures[paths] = flat.structure
    return structures


def _is_shape(node: Any) -> bool:
    return isinstance(node, Mapping) and set(cast("Mapping[Any, Any]", node)) == {"shape", "dtype"}
