"""Ops between workers and servers: which those are, and what of theirs never leaves a server."""

from __future__ import annotations

from collections.abc import Mapping

from commplan.ir.plan import Ref
from commplan.ir.schedule import Elastic, Exchange, Get, Op, Put, Value, operands

ServerOp = Exchange | Elastic | Put | Get


def server_op(op: Op, values: Mapping[Ref, Value]) -> ServerOp | None:
    """`op`, where it talks with servers; values: those of its phase and of the schedule's entry."""
    match op:
        case Put() | Get():
            return op
        case Exchange() if values[op.states[0]].placement.server is not None:
            return op
        case Elastic() if op.mode != "sync":
            return op
        case _:
            return None


def sent(op: Op) -> tuple[Ref, ...]:
    """What workers hold of the operands of `op`: not the states that its servers keep."""
    return tuple(ref for ref in operands(op) if ref not in _kept(op))


def renewed(op: ServerOp) -> tuple[Ref, ...]:
    """The results of `op` that lie on servers alone: of an exchange the weights come with its answer."""
    match op:
        case Exchange():
            return op.results[1:]
        case Elastic():
            return () if op.result is None else (op.result,)
        case Put():
            return (op.result,)
        case Get():
            return ()


def _kept(op: Op) -> tuple[Ref, ...]:
    match op:
        case Exchange():
            return op.states
        case Elastic():
            return (op.center,)
        case Get():
            return (op.operand,)
        case _:
            return ()
