"""From a checked plan to a schedule: sizes and shapes bound, lowered, rewritten by the passes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.plan import Plan
from commplan.ir.schedule import Leaf, Schedule
from commplan.ir.text import print_schedule
from commplan.passes.axes import bind_axes
from commplan.passes.base import Context
from commplan.passes.lower import lower
from commplan.passes.manager import Observer, Pipeline, Record
from commplan.passes.shapecheck import check_leaves, check_sizes
from commplan.passes.shapes import infer
from commplan.passes.wirecheck import check_wires
from commplan.topology import Topology, load_topology, place
from commplan.verify.schedule import verify


def compile_plan(
    plan: Plan,
    sizes: Mapping[str, int],
    shapes: Mapping[str, tuple[Leaf, ...]],
    *,
    topology: Topology | str | Path | None = None,
    mapping: Mapping[str, str] | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
    pipeline: str | Pipeline | None = None,
    observer: Observer | None = None,
    oversubscribe: bool = False,
    reproducers: Path | None = None,
) -> Schedule:
    """The schedule of `plan` on axes of `sizes`: what every rank runs, in which order.

    sizes: ranks along each axis; needed for those declared `?`, must agree with the others.
    shapes: leaves by name, for inputs, states and map results of type tree; `per` dimensions
    omitted, split ones uncut, records without their batch.
    topology, mapping: where axes lie (axis -> level); without a topology nothing is placed.
    order: name -> leaf paths in the order in which the backward pass makes them (default: last first).
    pipeline: passes as text (default: all of them); empty for none.
    observer: called with a `Record` after `lower` and after each pass.
    Raises CommplanError with CP07xx, and CP0606 where leaves are wider than what `native` adds in.
    """
    passes = pipeline if isinstance(pipeline, Pipeline) else Pipeline.parse(pipeline)
    axes = bind_axes(plan, sizes)
    if topology is not None:
        known = topology if isinstance(topology, Topology) else load_topology(topology)
        axes = place(axes, known, mapping or {}, oversubscribe=oversubscribe)
    elif mapping:
        fail("CP0714", "axes are mapped to levels, but no topology is given", "give --topology FILE")
    start = time.perf_counter()
    values = infer(plan, {axis.name: axis.size for axis in axes}, shapes)
    huge = check_sizes(plan, values, math.prod(axis.size for axis in axes))
    if huge:
        raise CommplanError(*huge)
    wrong = [*check_leaves(plan, values), *check_wires(plan, values)]
    if wrong:
        raise CommplanError(*wrong)
    _check_order(plan, order or {})
    schedule = lower(plan, axes, values)
    seconds = time.perf_counter() - start
    problems = verify(schedule)
    if problems:
        notes = (
            *(Note(p.message, p.span) for p in problems),
            Note(f"after `lower`:\n{print_schedule(schedule)}"),
        )
        message = f"lowering broke the schedule: {problems[0].message}"
        raise CommplanError(Diagnostic("CP0718", message, problems[0].span, notes, file=plan.file))
    if observer is not None:
        observer(Record("lower", "lower", seconds, None, schedule))
    context = Context({name: tuple(paths) for name, paths in (order or {}).items()})
    return passes.run(schedule, context, observer, reproducers)


def _check_order(plan: Plan, order: Mapping[str, Sequence[str]]) -> None:
    names = {value.name for value in plan.values}
    for name, paths in order.items():
        listed = not isinstance(paths, str) and isinstance(paths, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not listed or not all(isinstance(path, str) for path in paths):  # pyright: ignore[reportUnnecessaryIsInstance]
            fail(
                "CP0711",
                f"the order given for `{name}` is {paths!r}: a list of paths was expected",
                f'such as order={{{name!r}: ["b", "w"]}}',
                file=plan.file,
            )
        if name not in names:
            fail(
                "CP0711",
                f"an order is given for `{name}`, which plan `{plan.name}` does not have",
                file=plan.file,
            )
