"""Algorithms of a schedule's collectives: that they fit their axes, and that their programs are proved."""

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
from commplan.verify.scope import Scope

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
    try:
        proof = _prove(scope.schedule, op)
    except CommplanError as error:
        named = (msgspec.structs.replace(each, span=op.span, file=report.file) for each in error.diagnostics)
        report.found.extend(named)
        return
    for subject, wrong in proof.wrong:
        report.found.append(wrong.diagnostic(f"`{op.result}`: {subject}", span=op.span, file=report.file))


def prove_op(schedule: Schedule, op: Collective) -> Proof | None:
    """What is proved of a collective in a schedule in which `check_algorithm` found nothing; None where it is
    the backend's own."""
    if op.algorithm.name == NATIVE or op.kind not in KINDS:
        return None
    return _prove(schedule, op)


def _prove(schedule: Schedule, op: Collective) -> Proof:
    """Raises CP0735 where the levels of a hierarchy are neither the axes of `op` nor the levels of the
    topology over which its one axis is spread; and as `prove_levels`."""
    kind, root = cast("Kind", op.kind), op.root or 0
    if op.algorithm.name != HIERARCHICAL:
        return prove_algorithm(op.algorithm.name, kind, schedule.size(op.axes), root)
    sizes = _sizes(schedule, op)
    levels = ((algorithm.name, sizes[name]) for name, algorithm in op.algorithm.levels)
    return prove_levels(tuple(levels), kind, _root(op, sizes))


def _sizes(schedule: Schedule, op: Collective) -> dict[str, int]:
    """The ranks of each level of a hierarchy, the one first along which ranks are counted fastest."""
    names = [name for name, _ in op.algorithm.levels]
    broken = rules.levels(names, op.axes)
    if broken is None:
        return {axis: schedule.axis(axis).size for axis in reversed(op.axes)}
    if not names or len(op.axes) != 1:
        raise CommplanError(broken.diagnostic("CP0735", op.span, schedule.file))
    axis = schedule.axis(op.axes[0])
    wanted = [spread.level for spread in axis.levels]
    # An axis may count through its levels in another order than from the inside out.
    if sorted(names) != sorted(wanted) or len(set(wanted)) < len(wanted):
        lies = f"lies on {', '.join(wanted)}" if wanted else "has no levels without a topology"
        lists = f"does not list the axes {', '.join(op.axes)}"
        fail("CP0735", f"{op.algorithm} {lists}, nor their levels: `{axis.name}` {lies}")
    counts = [spread.count for spread in axis.levels]
    if min(counts) < 1 or math.prod(counts) != axis.size:
        product = " x ".join(map(str, counts))
        fail("CP0735", f"the levels of `{axis.name}` have {product} places for {axis.size} ranks")
    return {spread.level: spread.count for spread in axis.levels}


def _root(op: Collective, sizes: Mapping[str, int]) -> int:
    """The root, counted row-major over the axes, as hierarchies count ranks: innermost level fastest."""
    names = [name for name, _ in op.algorithm.levels]
    axes = list(sizes)[::-1]  # sizes are innermost first
    return position(coordinates(op.root or 0, axes, sizes), names[::-1], sizes)
