"""What a collective over MPI is, as a value."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Form, ReduceOp, Spread

Kind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "scatter", "gather"
]
KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order of the engine's enum
NATIVE = Algorithm("native")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One collective.

    kind: one of `collectives.program.KINDS`, or `all_to_all` (MPI's own only). axes: over which; None: all.
    root: counted row-major over `axes`. algorithm: `native` is MPI's own. chunk: bytes of a message; None:
    what suits the size. levels: how a single axis is spread over the topology, innermost first, where the
    levels of `hierarchical` are those. form: see `commplan.ir.schedule.Form`; of `start` and `finish` it is
    `split` always. where: the plan's line, for errors.
    """

    kind: Kind
    axes: tuple[str, ...] | None = None
    op: ReduceOp = "sum"
    root: int = 0
    algorithm: Algorithm = NATIVE
    chunk: int | None = None
    levels: tuple[Spread, ...] = ()
    form: Form = "call"
    where: str = ""
