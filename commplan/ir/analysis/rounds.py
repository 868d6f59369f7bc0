"""The ops of a hidden phase: rounds of exchanges, and the ops after the steps that hide them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.ir.ops import Collective, Merge, Op, Pick, operands, results
from commplan.ir.refs import Ref


class Rounds(NamedTuple):
    """The ops of a hidden phase, each part in the order of the phase.

    Attributes:
        exchanges: For each round, its exchanges and the ops that need as many earlier exchanges as they do.
            A round depends on the results of the round before. Empty if the phase exchanges nothing.
        end: The other ops, which need the results of the last round, or inputs that are read at the end.
    """

    exchanges: tuple[tuple[Op, ...], ...]
    end: tuple[Op, ...]


def is_late(op: Op) -> bool:
    """Whether `op` reads an input at the end of a call, after the steps that hide the exchange."""
    return isinstance(op, Pick | Merge) and op.late


def late_values(ops: Sequence[Op]) -> set[Ref]:
    """The values that depend on inputs that are read at the end of a call."""
    late: set[Ref] = set()
    for op in ops:
        if is_late(op) or not late.isdisjoint(operands(op)):
            late.update(results(op))
    return late


def rounds(ops: Sequence[Op]) -> Rounds:
    """Divide the ops of a hidden phase.

    The round of an op is the largest number of exchanges on a path from the inputs to it. Ops after the last
    round, and those that depend on inputs that are read at the end, are the end.
    """
    late = late_values(ops)
    depth: dict[Ref, int] = {}  # the largest number of exchanges on a path to each value
    counted: list[tuple[int, Op]] = []
    for op in ops:
        before = max((depth.get(ref, 0) for ref in operands(op)), default=0)
        depth |= dict.fromkeys(results(op), before + isinstance(op, Collective))
        counted.append((before, op))
    count = max((before + 1 for before, op in counted if isinstance(op, Collective)), default=0)
    is_early = [late.isdisjoint(results(op)) for op in ops]
    exchanges = tuple(
        tuple(op for (before, op), early in zip(counted, is_early, strict=True) if early and before == number)
        for number in range(count)
    )
    end = (op for (before, op), early in zip(counted, is_early, strict=True) if not early or before >= count)
    return Rounds(exchanges, tuple(end))
