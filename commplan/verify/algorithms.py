"""Algorithms of a schedule's collectives: that they fit their axes, and that their programs are proved."""

from __future__ import annotations

import math
from typing import cast

from commplan.collectives.hierarchical import NATIVE, Levels
from commplan.collectives.program import KINDS, Kind
from commplan.collectives.registry import algorithms
from commplan.diagnostics import CommplanError
from commplan.ir.axes import coordinates, position
from commplan.ir.schedule import Axis, Collective, Schedule
from commplan.ir.stages import rules
from commplan.verify.named import Proof, prove_algorithm, prove_levels
from commplan.verify.scope import Report, Scope

HIERARCHICAL = "hierarchical"


def check_algorithm(scope: Scope, op: Collective) -> None:
    """Report why `op` cannot be carried out as its algorithm says, or does not do what its kind promises.

    The axes of `op`, and its root, are known to be good.
    """
    name, report = op.algorithm.name, scope.report
    if op.form not in (None, "rounds") and scope.schedule.backend != "mpi":
        report.add("CP0735", f"there is no form `{op.form}` but under mpi", op.span)
    if name == NATIVE:
        return
    if name not in (HIERARCHICAL, *algorithms()):
        report.add("CP0735", f"there is no algorithm `{name}`", op.span)
        return
    if op.kind not in KINDS:
        report.add("CP0735", f"{op.kind} has no chunk program, only `{NATIVE}`: `{name}` was found", op.span)
        return
    levels = levels_of(scope.schedule, op, report) if name == HIERARCHICAL else ()
    if levels is None:
        return
    try:
        proof = _prove(scope.schedule, op, levels)
    except CommplanError as error:
        for found in error.diagnostics:
            report.add(found.code, found.message, op.span)
        return
    for subject, wrong in proof.wrong:
        report.found.append(wrong.diagnostic(f"`{op.result}`: {subject}", span=op.span, file=report.file))


def prove_op(schedule: Schedule, op: Collective) -> Proof | None:
    """What is proved of a collective in a schedule in which `check_algorithm` found nothing; None where it is
    the backend's own."""
    if op.algorithm.name == NATIVE or op.kind not in KINDS:
        return None
    levels = levels_of(schedule, op, Report("")) if op.algorithm.name == HIERARCHICAL else ()
    return None if levels is None else _prove(schedule, op, levels)


def _prove(schedule: Schedule, op: Collective, levels: Levels) -> Proof:
    kind, root = cast("Kind", op.kind), op.root or 0
    if levels:
        return prove_levels(levels, kind, _root(schedule, op, root))
    return prove_algorithm(op.algorithm.name, kind, schedule.size(op.axes), root)


def levels_of(schedule: Schedule, op: Collective, report: Report) -> Levels | None:
    """Algorithm and ranks of each level of a hierarchy, innermost first; None, and a report, where its levels
    are neither the axes of `op` nor the levels of the topology over which its one axis is spread."""
    names = [name for name, _ in op.algorithm.levels]
    broken = rules.levels(names, op.axes)
    if broken is None:
        sizes = [schedule.axis(name).size for name in names]
    elif not names or len(op.axes) != 1:
        report.refuse("CP0735", broken, op.span)
        return None
    else:
        spread = _spread(schedule.axis(op.axes[0]), op, report)
        if spread is None:
            return None
        sizes = spread
    return [(algorithm.name, size) for (_, algorithm), size in zip(op.algorithm.levels, sizes, strict=True)]


def _spread(axis: Axis, op: Collective, report: Report) -> list[int] | None:
    """The sizes of the levels of one axis, if the algorithm lists them."""
    names = [name for name, _ in op.algorithm.levels]
    wanted = [spread.level for spread in axis.levels]
    # An axis may count through its levels in another order than from the inside out.
    if sorted(names) != sorted(wanted) or len(set(wanted)) < len(wanted):
        lies = f"lies on {', '.join(wanted)}" if wanted else "has no levels without a topology"
        said = f"does not list the axes {', '.join(op.axes)}"
        _misfit(op, f"{op.algorithm} {said}, nor their levels: `{axis.name}` {lies}", report)
        return None
    counts = [spread.count for spread in axis.levels]
    if min(counts) < 1 or math.prod(counts) != axis.size:
        product = " x ".join(map(str, counts))
        _misfit(op, f"the levels of `{axis.name}` have {product} places for {axis.size} ranks", report)
        return None
    sizes = {spread.level: spread.count for spread in axis.levels}
    return [sizes[name] for name in names]


def _misfit(op: Collective, message: str, report: Report) -> None:
    report.add("CP0735", message, op.span)


def _root(schedule: Schedule, op: Collective, root: int) -> int:
    """The root, counted row-major over the axes, as hierarchies count ranks: innermost level fastest."""
    names = [name for name, _ in op.algorithm.levels]
    if sorted(names) == sorted(op.axes):
        sizes = {axis: schedule.axis(axis).size for axis in op.axes}
    else:
        sizes = {spread.level: spread.count for spread in reversed(schedule.axis(op.axes[0]).levels)}
    return position(coordinates(root, sizes, sizes), reversed(names), sizes)
