"""Works as plans of one line, and their compiled schedules.

`how` of a work is the rest of the line: empty leaves the choice to the compiler, `via ring` pins the
algorithm, and `via ring | rounds` pins the form of the collective too: `call`, `rounds` or `split`.
`hierarchical(host = ring, rack = ring)`, without `via`, is one over the levels of the topology, which the
language cannot express for a single axis.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import numpy as np

import commplan
from bench.harness.work import Work
from commplan.api import shapes_of
from commplan.compiler import compile_plan
from commplan.ir.plan import Algorithm, Arg, Hints
from commplan.ir.schedule import Collective, Op, Schedule

LINES = {
    "all_reduce": ("partial data", "reduce x over data by sum"),
    "broadcast": ("per data", "broadcast x over data from 0"),
    "reduce_scatter": ("partial data", "scatter x over data by sum"),
    "all_gather": ("split data", "gather x over data"),
}
PLAN = """\
plan bench
axis data = {ranks}
input x : tree {placement}
each step {{
    y = {line} {how}
    output y
}}
"""


def program(work: Work, comm: Any, **more: Any) -> commplan.Program:
    """`work` for the ranks of `comm`; `more` goes to `Plan.compile`."""
    compiled = plan_of(work, comm.Get_size()).compile(comm, shapes={"x": _leaves(work)}, **more)
    return commplan.Program(in_form(compiled.schedule, work), compiled.structures)


def schedule(work: Work, count: int, **more: Any) -> Schedule:
    """The same without running; `more` is passed to `compiler.compile_plan`."""
    shapes = {"x": shapes_of(_leaves(work))}
    compiled = compile_plan(plan_of(work, count).graph, shapes, axes={"data": count}, backend="mpi", **more)
    return in_form(compiled, work)


def plan_of(work: Work, ranks: int) -> commplan.Plan:
    placement, line = LINES[work.kind]
    how = "" if work.how.startswith("hierarchical") else work.how.partition("|")[0].strip()
    return commplan.loads(PLAN.format(ranks=ranks, placement=placement, line=line, how=how))


def _leaves(work: Work) -> list[Any]:
    return [np.broadcast_to(np.float32(0), (count,)) for count in work.counts]


def chosen(compiled: Schedule) -> str:
    """How the collectives are carried out, and how many are alike."""
    ways: Counter[str] = Counter()
    for op in (op for phase in compiled.phases for op in phase.ops if isinstance(op, Collective)):
        words = [str(op.algorithm), f"chunk {op.hints.chunk}" if op.hints.chunk else "", op.form or ""]
        ways[" ".join(word for word in words if word)] += 1
    return ", ".join(f"{count} x {way}" if count > 1 else way for way, count in ways.items())


def in_form(compiled: Schedule, work: Work) -> Schedule:
    """The schedule with all of its collectives in the form, or over the levels, that `work` asks for."""
    way, _, form = (part.strip() for part in work.how.partition("|"))
    levels = re.findall(r"(\w+) = (\w+)", way) if way.startswith("hierarchical") else []
    algorithm = Algorithm("hierarchical", tuple(Arg(name, level) for level, name in levels))
    changes = ({"form": form} if form else {}) | (
        {"algorithm": algorithm, "hints": Hints()} if levels else {}
    )

    def changed(op: Op) -> Op:
        return msgspec.structs.replace(op, **changes) if isinstance(op, Collective) else op

    phases = tuple(
        msgspec.structs.replace(phase, ops=tuple(changed(op) for op in phase.ops))
        for phase in compiled.phases
    )
    return msgspec.structs.replace(compiled, phases=phases)
