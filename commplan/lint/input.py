"""What loads and random functions do that is hardly meant: CP1205, CP1206."""

from __future__ import annotations

from collections.abc import Iterator

from commplan.diagnostics import Diagnostic, listed, plural
from commplan.ir.plan import AxisKind, Load, Map
from commplan.lint.subject import Subject

TAIL_MARGIN = 0.05  # of the records of an epoch


def shared_draws(subject: Subject) -> Iterator[Diagnostic]:
    """CP1205: a random fn on what all members share, so that all of them get the same numbers."""
    plan = subject.plan
    members = [axis.name for axis in plan.axes if axis.kind is AxisKind.ENSEMBLE]
    for stage in subject.stages:
        if not isinstance(stage, Map) or not plan.fn(stage.fn).random:
            continue
        per = plan.value(stage.results[0]).placement.per
        alike = [member for member in members if member not in per]
        if not alike:
            continue
        message = f"all members of {listed(alike)} get the same random numbers of `{stage.fn}`"
        note = f"write `per {', '.join(alike)}` behind the call, and each member draws its own"
        meant = "where one draw for all is meant, ignore this: `# commplan: ignore CP1205`"
        yield subject.warning("CP1205", message, stage.span, note, meant)


def dropped_records(subject: Subject) -> Iterator[Diagnostic]:
    """CP1206: `tail drop` leaves out more than 5% of the records of every epoch."""
    records = subject.given.records
    for stage in subject.stages:
        if not isinstance(stage, Load) or stage.tail != "drop" or stage.source not in records:
            continue
        length = records[stage.source]
        lost, batch = max((length % batch, batch) for batch in stage.batch)
        if lost <= TAIL_MARGIN * length:
            continue
        share = f"{100 * lost / length:.0f}%" if lost < length else "all"
        message = f"`tail drop` leaves out {plural(lost, 'record')} of {length} in every epoch: {share}"
        note = f"a batch takes {batch}: a smaller one loses less, and `tail pad` counts every record"
        yield subject.warning("CP1206", message, stage.span, note)
