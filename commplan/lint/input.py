"""Probable mistakes in loads and random functions: CP1205, CP1206, CP1210."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from commplan.diagnostics import Diagnostic, Note, listed, plural
from commplan.ir.plan import AxisKind, Load, MapStage, operands, results
from commplan.lint.subject import Subject

TAIL_MARGIN = 0.05  # most records that `tail drop` may omit without a warning, as a fraction of an epoch
_ORDER = ("seed", "visit", "per", "batch", "tail")  # the fields of a load that determine its order


def shared_draws(subject: Subject) -> Iterator[Diagnostic]:
    """CP1205: a random function of shared values, so that all members receive the same numbers."""
    plan = subject.plan
    members = [axis.name for axis in plan.axes if axis.kind is AxisKind.ENSEMBLE]
    for stage in subject.stages:
        if not isinstance(stage, MapStage) or not plan.fn(stage.fn).random:
            continue
        per = plan.value(stage.results[0]).placement.per
        sharing_members = [member for member in members if member not in per]
        if not sharing_members:
            continue
        message = f"all members of {listed(sharing_members)} get the same random numbers of `{stage.fn}`"
        note = f"write `per {', '.join(sharing_members)}` after the call for different numbers in each member"
        meant = "if one draw for all is intended, ignore this: `# commplan: ignore CP1205`"
        yield subject.warning("CP1205", message, stage.span, note, meant)


def unlike_loads(subject: Subject) -> Iterator[Diagnostic]:
    """CP1210: a function of records from two loads with different orders of their sources.

    Two orders of the same sources are accepted, for example images that are mixed with other images.
    """
    for phase in subject.plan.phases:
        loads: dict[str, frozenset[Load]] = {}  # for each value, the loads that it depends on
        for stage in phase.stages:
            operand_loads = [loads.get(ref, frozenset[Load]()) for ref in operands(stage)]
            made_of = (
                frozenset({stage}) if isinstance(stage, Load) else frozenset[Load]().union(*operand_loads)
            )
            loads |= dict.fromkeys(results(stage), made_of)
            if not isinstance(stage, MapStage) or made_of in operand_loads:
                continue  # reported at the stage that defines the operand
            sources: dict[tuple[object, ...], set[str]] = {}
            for load in made_of:
                sources.setdefault(_order(load), set()).add(load.source)
            if len({frozenset(names) for names in sources.values()}) > 1:
                yield _unlike(subject, stage, made_of)


def _order(load: Load) -> tuple[object, ...]:
    return tuple(getattr(load, name) for name in _ORDER)


def _unlike(subject: Subject, stage: MapStage, loads: Collection[Load]) -> Diagnostic:
    """The warning for `stage`, which reads `loads` in at least two orders."""
    first, *later = sorted(loads, key=lambda load: load.span)
    other = next(load for load in later if _order(load) != _order(first))
    names = [name for name in _ORDER if getattr(first, name) != getattr(other, name)]
    sources = sorted({load.source for load in loads} - {first.source})
    and_others = f"and `{other.source}` in different orders"
    if first.source == other.source:
        and_others = f"in different orders, and of {listed(sources)}"
    message = f"`{stage.fn}` takes records of `{first.source}` {and_others}"
    differ = Note(f"this load and that of `{first.source}` differ in {' and '.join(names)}", other.span)
    note = "images and labels correspond if both loads have the same seed, visit, batch and tail"
    meant = "if any two records may be combined, ignore this: `# commplan: ignore CP1210`"
    return subject.warning("CP1210", message, stage.span, differ, note, meant)


def dropped_records(subject: Subject) -> Iterator[Diagnostic]:
    """CP1206: `tail drop` omits more than 5% of the records of every epoch, for the worst batch size.

    Only sources of known lengths are checked.
    """
    records = subject.inputs.records
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
