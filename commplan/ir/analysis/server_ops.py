"""Ops between workers and servers: which those are, and what of theirs never leaves a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from commplan.ir.ops import kept
from commplan.ir.plan import Ref
from commplan.ir.schedule import Elastic, Exchange, Get, Op, Put, Value, operands, results

ServerOp = Exchange | Elastic | Put | Get


def server_op(op: Op, values: Mapping[Ref, Value]) -> ServerOp | None:
    """`op`, where it talks with servers; values: those of its phase and of the schedule's entry."""
    return cast("ServerOp", op) if op.asks_servers(values) else None


def sent(op: Op) -> tuple[Ref, ...]:
    """What workers hold of the operands of `op`: not the states that its servers keep."""
    return tuple(ref for ref in operands(op) if ref not in kept(op))


def renewed(op: ServerOp) -> tuple[Ref, ...]:
    """The results of `op` that lie on servers alone: of an exchange the weights come with its answer."""
    return results(op)[op.ANSWERS :]
