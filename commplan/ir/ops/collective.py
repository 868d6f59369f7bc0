from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import Algorithm, Hints
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.types import DType

CollectiveKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"
]  # fmt: skip
ReduceOp = Literal["sum", "max", "min"]
# How a backend carries out a chunk program: one operation of its own for each round (`lax.ppermute`,
# `mpi4jax.sendrecv`), the whole program in one call, or a call that starts it and one that finishes it.
Form = Literal["rounds", "call", "split"]


class Collective(BaseOp, frozen=True, tag="collective", gc=False):
    """One collective over `axes`, leaf by leaf.

    `algorithm`: `native`, a chunk program of `commplan.collectives`, or `hierarchical` with one per level:
    the keys of its levels are axes of `axes`, or, of one axis, the levels of the topology that it spans
    (`Axis.levels`). `hints.chunk` is the number of bytes of a message, where programs are cut into slices.
    all_reduce: same shape out. reduce_scatter: a flat [n*k] in, this rank's [k] out.
    all_gather: [k] in, [n*k] out in rank order. all_to_all: flat [n*k] in and out, row i to rank
    i. broadcast: from `root`, counted row-major over `axes`, first major. reduce: the result on `root`, and
    zeros elsewhere.
    """

    kind: CollectiveKind
    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    dtype: DType  # of the widest leaf that moves
    nbytes: int  # of one rank's operand
    span: Span
    op: ReduceOp | None = None
    root: int | None = None
    algorithm: Algorithm = Algorithm("native")
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "network"
    form: Form | None = None  # None: the backend's usual one
    pinned: bool = False  # the plan says `via`: no pass takes another algorithm
