"""The ops that use servers, and their operands and results that exist on servers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from commplan.ir.ops import server_operands
from commplan.ir.plan import Ref
from commplan.ir.schedule import Elastic, Exchange, Get, Op, Put, Value, operands, results

# An op that may use servers. An `Exchange` or `Elastic` uses them only if its states are on servers.
ServerOp = Exchange | Elastic | Put | Get


def server_op(op: Op, values: Mapping[Ref, Value]) -> ServerOp | None:
    """`op` if it uses servers, else None. `values` are those of its phase and of the schedule's entry."""
    return cast("ServerOp", op) if op.uses_servers(values) else None


def worker_operands(op: Op, values: Mapping[Ref, Value]) -> tuple[Ref, ...]:
    """The operands of `op` that workers hold: all of them, except states on servers if it uses servers."""
    if not op.uses_servers(values):
        return operands(op)
    return tuple(ref for ref in operands(op) if ref not in server_operands(op))


def server_results(op: ServerOp) -> tuple[Ref, ...]:
    """The results of `op` that exist on servers only; an exchange also returns the weights."""
    return results(op)[op.RETURNED :]
