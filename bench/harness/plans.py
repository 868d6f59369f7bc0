"""Works as plans of one line, and what they were compiled to.

`how` of a work is what follows the line: empty leaves the choice to the compiler, `via ring` pins the
algorithm, `{ chunk = 64 KiB }` is a hint, and `via ring | rounds` pins the form of the collective too:
`call`, `rounds` or `split`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np

import commplan
from bench.harness.work import Work
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


def program(work: Work, ranks: int, mesh: Any = None, **more: Any) -> commplan.Program:
    """`work` for `ranks` ranks, on `mesh` where there is one; `more` goes to `Plan.compile`."""
    placement, line = LINES[work.kind]
    how, _, form = (part.strip() for part in work.how.partition("|"))
    plan = commplan.loads(PLAN.format(ranks=ranks, placement=placement, line=line, how=how))
    leaves = [np.broadcast_to(np.float32(0), (count,)) for count in work.counts]
    made = plan.compile(mesh, shapes={"x": leaves}, **more)
    return in_form(made, form) if form else made


def collectives(made: commplan.Program) -> list[Collective]:
    schedule: Schedule = made.schedule
    return [op for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)]


def chosen(made: commplan.Program) -> str:
    """How the collectives are carried out, and how many are alike."""
    ways: Counter[str] = Counter()
    for op in collectives(made):
        words = [str(op.algorithm), f"chunk {op.hints.chunk}" if op.hints.chunk else "", op.form or ""]
        ways[" ".join(word for word in words if word)] += 1
    return ", ".join(f"{count} x {way}" if count > 1 else way for way, count in ways.items())


def in_form(made: commplan.Program, form: str) -> commplan.Program:
    """The program with all of its collectives in `form`."""
    schedule: Schedule = made.schedule

    def changed(op: Op) -> Op:
        return msgspec.structs.replace(op, form=form) if isinstance(op, Collective) else op

    phases = tuple(
        msgspec.structs.replace(phase, ops=tuple(changed(op) for op in phase.ops))
        for phase in schedule.phases
    )
    return commplan.Program(msgspec.structs.replace(schedule, phases=phases), made.structures)
