"""Check that the algorithms of collectives fit their axes, and prove their chunk programs.

`verify.structural` calls `check_algorithm` for each collective; reports of proofs call `prove_op`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import msgspec

from commplan.collectives.hierarchical import NATIVE
from commplan.collectives.program import KINDS, Kind
from commplan.collectives.registry import algorithms
from commplan.diagnostics import CommplanError, fail
from commplan.ir.axes import coordinates, position
from commplan.ir.schedule import Collective, Schedule
from commplan.ir.stages import rules
from commplan.verify.programs.algorithm_proof import Proof, prove_algorithm, prove_levels
from commplan.verify.scope import OpScope

HIERARCHICAL = "hierarchical"  # the name of an algorithm with one algorithm for each level


def check_algorithm(scope: OpScope, op: Collective) -> None:
    """Report an algorithm that does not fit `op`, or a chunk program that does not satisfy its postcondition.

    The axes and the root of `op` must have been checked before.
    """
    name, report = op.algorithm.name, scope.report
    if op.form not in (None, "rounds") and scope.schedule.backend != "mpi":
        report.add("CP0735", f"form `{op.form}` is for the mpi backend only", op.span)
    if name == NATIVE:
        return
    if name not in (HIERARCHICAL, *algorithms()):
        report.add("CP0735", f"there is no algorithm `{name}`", op.span)
        return
    if op.kind not in KINDS:
        report.add("CP0735", f"{op.kind} has no chunk program, only `{NATIVE}`: `{name}` was found", op.span)
        return
    try:
        proof = _prove(scope.schedule, op)
    except CommplanError as error:
        located = (
            msgspec.structs.replace(diagnostic, span=op.span, file=report.file)
            for diagnostic in error.diagnostics
        )
        report.diagnostics.extend(located)
        return
    for subject, wrong in proof.wrong:
        report.diagnostics.append(
            wrong.diagnostic(f"`{op.result}`: {subject}", span=op.span, file=report.file)
        )


def prove_op(schedule: Schedule, op: Collective) -> Proof | None:
    """The proof of a collective that `check_algorithm` accepted.

    Returns:
        The proof, or None for the backend's native collective, whose implementation is not proved.
    """
    if op.algorithm.name == NATIVE or op.kind not in KINDS:
        return None
    return _prove(schedule, op)


def _prove(schedule: Schedule, op: Collective) -> Proof:
    """Prove the chunk program of `op`.

    Raises:
        CommplanError: CP0735 if the levels of a hierarchy are neither the axes of `op` nor the topology
            levels of its only axis, or if these levels do not have exactly the ranks of the axis; or an error
            of `prove_algorithm` or `prove_levels`.
    """
    kind, root = cast("Kind", op.kind), op.root or 0
    if op.algorithm.name != HIERARCHICAL:
        return prove_algorithm(op.algorithm.name, kind, schedule.size(op.axes), root)
    sizes = _sizes(schedule, op)
    levels = ((algorithm.name, sizes[name]) for name, algorithm in op.algorithm.levels)
    return prove_levels(tuple(levels), kind, _root(op, sizes))


def _sizes(schedule: Schedule, op: Collective) -> dict[str, int]:
    """The number of ranks of each level of a hierarchy, fastest-varying level first.

    Raises CP0735 as `_prove` does.
    """
    names = [name for name, _ in op.algorithm.levels]
    broken = rules.hierarchy_levels(names, op.axes)
    if broken is None:
        return {axis: schedule.axis(axis).size for axis in reversed(op.axes)}
    if not names or len(op.axes) != 1:
        raise CommplanError(broken.diagnostic("CP0735", op.span, schedule.file))
    axis = schedule.axis(op.axes[0])
    level_names = [spread.level for spread in axis.levels]
    # The levels of an axis are not necessarily ordered from innermost to outermost.
    if sorted(names) != sorted(level_names) or len(set(level_names)) < len(level_names):
        location = f"is on {', '.join(level_names)}" if level_names else "has no levels without a topology"
        mismatch = f"does not list the axes {', '.join(op.axes)}"
        fail("CP0735", f"{op.algorithm} {mismatch}, nor their levels: `{axis.name}` {location}")
    counts = [spread.count for spread in axis.levels]
    if min(counts) < 1 or math.prod(counts) != axis.size:
        product = " x ".join(map(str, counts))
        fail("CP0735", f"the levels of `{axis.name}` have {product} places for {axis.size} ranks")
    return {spread.level: spread.count for spread in axis.levels}


def _root(op: Collective, sizes: Mapping[str, int]) -> int:
    """The root's rank in the order used by hierarchical algorithms (innermost level fastest); 0 without one.

    `sizes` are the sizes of the levels, fastest-varying level first.
    """
    names = [name for name, _ in op.algorithm.levels]
    axes = list(sizes)[::-1]  # sizes are innermost first
    return position(coordinates(op.root or 0, axes, sizes), names[::-1], sizes)
