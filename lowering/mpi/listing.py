"""The collectives that a traced function issues over MPI, in its order: the engine's and mpi4jax's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from commplan.collectives.program import REDUCING
from commplan.lowering.jax.listing import equations, typed
from commplan.lowering.mpi.collectives import Channel, issued
from commplan.lowering.mpi.typing_shim import MPI

_BETWEEN_TWO = ("send_mpi", "recv_mpi", "sendrecv_mpi")
_ISSUING = ("commplan_call", "commplan_start")  # what `commplan_finish` ends was issued before
_OPS = ((MPI.SUM, "sum"), (MPI.MAX, "max"), (MPI.MIN, "min"), (MPI.PROD, "prod"))


class Listed(NamedTuple):
    """A collective of a trace.

    text: kind, operation, type and size of its array. scope: where JAX says that it comes from. ranks: who
    takes part, by their numbers in `comm`. planned: a channel's own, which all of its ranks call alike.
    """

    text: str
    scope: str
    comm: Any
    ranks: tuple[int, ...]
    planned: bool = False


def collectives_of(jaxpr: Any, channel: Channel) -> Iterator[Listed]:
    """The collectives of `jaxpr` and of all that it calls; those of a loop's body once, all branches'.
    Planned are those of `channel`.

    Messages between two ranks (`send`, `recv`, `sendrecv`) and requests to servers are left out.
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
                yield Listed(text, scope, groups.own, groups.along(axes), groups is channel.groups)
        elif name.endswith("_mpi") and name not in _BETWEEN_TWO:
            yield _of_mpi4jax(equation, scope, loops)


def _of_mpi4jax(equation: Any, scope: str, around: str) -> Listed:
    how = {key: getattr(value, "wrapped", value) for key, value in equation.params.items()}
    op = next((name for op, name in _OPS if op == how.get("op")), "op" if "op" in how else "")
    given = ", ".join(filter(None, (op, f"root {how['root']}" if "root" in how else "")))
    arrays = " ".join(typed(str(x.aval.dtype), x.aval.shape) for x in equation.invars)
    text = f"mpi4jax.{equation.primitive.name.removesuffix('_mpi')}({given}) {arrays}".rstrip()
    comm = how["comm"]
    return Listed(f"{text}{around}", scope, comm, tuple(range(comm.Get_size())))
