"""What loads and random functions do that is hardly meant: CP1205, CP1206, CP1210."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from commplan.diagnostics import Diagnostic, Note, listed, plural
from commplan.ir.plan import AxisKind, Load, Map, operands, results
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


def unlike_loads(subject: Subject) -> Iterator[Diagnostic]:
    """CP1210: a function of records of two loads that go through their sources in different orders.

    Two orders of one set of sources, as of images that are mixed with others, are meant.
    """
    for phase in subject.plan.phases:
        loads: dict[str, frozenset[Load]] = {}  # by value: the loads that it is made of
        for stage in phase.stages:
            each = [loads.get(ref, frozenset[Load]()) for ref in operands(stage)]
            made_of = frozenset({stage}) if isinstance(stage, Load) else frozenset[Load]().union(*each)
            loads |= dict.fromkeys(results(stage), made_of)
            if not isinstance(stage, Map) or made_of in each:
                continue  # an error of one operand was reported at the stage that makes it
            sources: dict[tuple[object, ...], set[str]] = {}
            for load in made_of:
                sources.setdefault(_order(load), set()).add(load.source)
            if len({frozenset(names) for names in sources.values()}) > 1:
                yield _unlike(subject, stage, made_of)


_ORDER = ("seed", "visit", "per", "batch", "tail")


def _order(load: Load) -> tuple[object, ...]:
    return tuple(getattr(load, name) for name in _ORDER)


def _unlike(subject: Subject, stage: Map, loads: Collection[Load]) -> Diagnostic:
    first, *rest = sorted(loads, key=lambda load: load.span)
    other = next(load for load in rest if _order(load) != _order(first))
    names = [name for name in _ORDER if getattr(first, name) != getattr(other, name)]
    rest = sorted({load.source for load in loads} - {first.source})
    and_others = f"and `{other.source}` in different orders"
    if first.source == other.source:
        and_others = f"in different orders, and of {listed(rest)}"
    message = f"`{stage.fn}` is given records of `{first.source}` {and_others}"
    differ = Note(f"this load and that of `{first.source}` differ in {' and '.join(names)}", other.span)
    note = "an image meets its own label if both loads have the same seed, visit, batch and tail"
    meant = "if any record may meet any other, ignore this: `# commplan: ignore CP1210`"
    return subject.warning("CP1210", message, stage.span, differ, note, meant)


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
