"""Lists the collectives that a traced function issues over MPI: those of the engine and those of mpi4jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mpi4py import MPI

from commplan.ir.collective_kinds import REDUCING
from commplan.lowering.jax.listing import equations, typed
from commplan.lowering.mpi.collectives import Channel, issued

# Primitives of mpi4jax for messages between two ranks.
_BETWEEN_TWO = ("send_mpi", "recv_mpi", "sendrecv_mpi")
# Primitives that issue a collective. `commplan_finish` completes one that is already listed.
_ISSUING = ("commplan_call", "commplan_start")
# The reductions that the text names.
_OPS = ((MPI.SUM, "sum"), (MPI.MAX, "max"), (MPI.MIN, "min"), (MPI.PROD, "prod"))


class ListedCollective(NamedTuple):
    """A collective of a traced function.

    Attributes:
        text: The kind, the reduction, and the dtype and size of the array.
        scope: The JAX name scope.
        comm: The communicator.
        ranks: The participating ranks, as ranks of `comm`.
        planned: Whether it belongs to the plan's channel, so that all ranks issue the same.
    """

    text: str
    scope: str
    comm: Any
    ranks: tuple[int, ...]
    planned: bool = False


def collectives_of(jaxpr: Any, channel: Channel) -> Iterator[ListedCollective]:
    """The collectives of `jaxpr` and of the functions that it calls, in order.

    A collective in a loop body is listed once; all branches of a conditional are listed. Messages between two
    ranks (`send`, `recv`, `sendrecv`) and requests to servers are not listed.

    Args:
        jaxpr: The jaxpr.
        channel: The plan's channel.
    """
    for equation, scope, loops in equations(jaxpr):
        name = equation.primitive.name
        if name in _ISSUING:
            collective = issued(equation.params["program"])
            if collective is not None:
                spec, groups = collective.spec, collective.groups
                axes, array = spec.axes or (), typed(collective.dtype, (collective.size,))
                reduction = f"({spec.op})" if spec.kind in REDUCING else ""
                text = f"{spec.kind}{reduction} {array} over {', '.join(axes)}"
                text += (f" from {spec.root}" if spec.root else "") + f" by {spec.algorithm}{loops}"
                yield ListedCollective(text, scope, groups.comm, groups.along(axes), groups is channel.groups)
        elif name.endswith("_mpi") and name not in _BETWEEN_TWO:
            yield _of_mpi4jax(equation, scope, loops)


def _of_mpi4jax(equation: Any, scope: str, loops: str) -> ListedCollective:
    """A collective of mpi4jax, whose parameters are wrapped in hashable objects."""
    params = {key: getattr(value, "wrapped", value) for key, value in equation.params.items()}
    op = next((name for mpi_op, name in _OPS if mpi_op == params.get("op")), "op" if "op" in params else "")
    options = ", ".join(filter(None, (op, f"root {params['root']}" if "root" in params else "")))
    arrays = " ".join(typed(str(x.aval.dtype), x.aval.shape) for x in equation.invars)
    text = f"mpi4jax.{equation.primitive.name.removesuffix('_mpi')}({options}) {arrays}".rstrip()
    comm = params["comm"]
    return ListedCollective(f"{text}{loops}", scope, comm, tuple(range(comm.Get_size())))
