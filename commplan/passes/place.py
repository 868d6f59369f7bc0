"""place: who holds and updates what of a parameter exchange between workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from commplan.diagnostics import fail
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Exchange, Op, Phase, Schedule
from commplan.passes.base import Context, Pass
from commplan.passes.choosing import Chooser
from commplan.passes.ownership import Exchanging, colocated
from commplan.passes.owning import Owners, chosen, inner_first, levels, predicted, strange
from commplan.passes.relocation import Relocation, split_entry
from commplan.passes.rewrite import Editor
from commplan.passes.ways import CLEARLY


class PlacePass(Pass, frozen=True):
    """Parameter exchanges between workers become scatters, updates by owners, and gathers.

    how: who updates where the plan does not say `via parameter_server`. `auto`: owners, unless an all-reduce
    is predicted to save a fifth; `sharded` and `replicated` take one of the two whatever they cost.
    """

    name: ClassVar[str] = "place"
    after: ClassVar[tuple[str, ...]] = ("share",)
    how: Literal["auto", "sharded", "replicated"] = "auto"

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        exchanges = [op for phase in schedule.phases for op in phase.ops if colocated(schedule, op)]
        if not exchanges:
            return schedule
        chooser = Chooser(schedule, context)
        owners = {op.results: self._owners(chooser, op) for op in exchanges if isinstance(op, Exchange)}
        moved = _moved(schedule, owners)
        for results, one in owners.items():
            owners[results] = one._replace(moved=any(name_of(ref) in moved for ref in results[1:]))
        choices = tuple(
            chosen(chooser, op, owners[op.results]) for op in exchanges if isinstance(op, Exchange)
        )
        schedule = split_entry(schedule, moved)
        phases = tuple(_phase(schedule, phase, owners, moved) for phase in schedule.phases)
        return msgspec.structs.replace(schedule, phases=phases, choices=(*schedule.choices, *choices))

    def _owners(self, chooser: Chooser, op: Exchange) -> Owners:
        schedule, state = chooser.schedule, name_of(op.states[0])
        if op.hints.staleness:
            fail(
                "CP0728",
                f"`staleness = {op.hints.staleness}` needs a server: `{state}` lives with the workers",
                "all workers take part in every update, so that none can run ahead of another",
                f"leave `staleness` out, or declare `server hub = 1` and `state {state} : tree on hub`",
                span=op.span,
                file=schedule.file,
            )
        asked = op.algorithm.get("within") if op.algorithm is not None else None
        within = str(asked) if asked is not None else None
        axes, why = inner_first(op.over, within), strange(schedule, op)
        if op.algorithm is not None and why is not None:
            fail(
                "CP0726",
                f"owners cannot keep {why}",
                "what is cut among them with the weights: leaves of the same shape whose path ends with a"
                " weight's path; a scalar is kept by everyone",
                "leave `via parameter_server` out: then every worker updates everything",
                span=op.span,
                file=schedule.file,
            )
        if op.algorithm is not None:
            return Owners("sharded", axes, levels(axes, within))
        if why is not None or self.how == "replicated":
            return Owners("replicated", op.over)
        sharded, replicated = predicted(chooser, op, axes)
        saves = sharded is not None and replicated is not None and replicated < sharded * (1 - CLEARLY)
        return Owners("replicated", op.over) if saves and self.how == "auto" else Owners("sharded", axes)


def _moved(schedule: Schedule, owners: Mapping[tuple[Ref, ...], Owners]) -> dict[str, tuple[str, ...]]:
    """The states that owners keep, and the axes that they are split over: those of optimisers, where all
    exchanges cut them alike."""
    weights = {name_of(results[0]) for results in owners}
    ways: dict[str, set[tuple[str, ...]]] = {}
    for results, one in owners.items():
        for ref in results[1:]:
            ways.setdefault(name_of(ref), set()).add(one.axes if one.how == "sharded" else ())
    kept = {name: next(iter(found)) for name, found in ways.items() if len(found) == 1}
    return {name: axes for name, axes in kept.items() if axes and name not in weights}


def _phase(
    schedule: Schedule,
    phase: Phase,
    owners: Mapping[tuple[Ref, ...], Owners],
    moved: Mapping[str, tuple[str, ...]],
) -> Phase:
    names = {*map(name_of, phase.states), *(binding.name for binding in phase.updates)}
    if names.isdisjoint(moved) and not any(colocated(schedule, op) for op in phase.ops):
        return phase
    editor = Editor(schedule, phase)
    relocation = Relocation(editor, moved)
    exchanging = Exchanging(editor, relocation)
    ops: list[Op] = []
    for op in phase.ops:
        if isinstance(op, Exchange) and op.results in owners:
            exchanging.write(ops, op, owners[op.results])
        else:
            ops.append(op)
    return editor.finish(relocation.rewrite(ops, exchanging.own))
