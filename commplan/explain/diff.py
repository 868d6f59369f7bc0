"""Comparison of two schedules: time, memory, rounds, bytes, collectives, buckets and ops of each phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from commplan.cost import Prediction
from commplan.explain.report import traffic
from commplan.explain.servers import server_lines
from commplan.ir.grouping import grouped
from commplan.ir.schedule import Collective, Pack, Phase, Schedule
from commplan.ir.types import timed
from commplan.verify.algorithms import prove_op
from commplan.verify.memory import memory

Number = float | int


class Change(msgspec.Struct, frozen=True):
    """One compared quantity.

    Attributes:
        phase: The name of the phase; "" for the whole schedule.
        measure: The quantity, such as `memory`; times are in seconds, and sizes in bytes.
        subject: The subject of the quantity, such as a level; "" if there is only one.
        before: The value in the first schedule; None if it does not have it, or if it is unknown.
        after: The value in the second schedule; None as in `before`.
    """

    phase: str
    measure: str
    subject: str
    before: Number | str | None
    after: Number | str | None

    @property
    def is_changed(self) -> bool:
        """Whether the values differ."""
        return self.before != self.after

    @property
    def growth(self) -> float | None:
        """The relative growth: 0.05 is 5%; infinite from 0 or nothing, -1 to nothing.

        None for equal values, for text, and for unknown rounds.
        """
        is_unknown = self.measure == "rounds" and None in (self.before, self.after)
        before, after = self.before or 0, self.after or 0
        if is_unknown or isinstance(before, str) or isinstance(after, str) or before == after:
            return None
        return (after - before) / before if before else float("inf")


class Limit(msgspec.Struct, frozen=True):
    """A limit for the growth of a measure.

    Attributes:
        measure: The measure, as in `Change`; only changes without a subject are limited.
        share: The largest relative growth; 0.05 is 5%.
    """

    measure: str
    share: float

    def exceeded(self, changes: Sequence[Change]) -> list[Change]:
        """The changes of this measure that exceed the limit. A phase that is new grew from nothing."""
        relevant = (change for change in changes if (change.measure, change.subject) == (self.measure, ""))
        return [change for change in relevant if (change.growth or 0.0) > self.share]


_Measures = dict[tuple[str, str], Number | str]  # values by measure and subject, as in `Change`
TIMES = ("exposed", "alone")  # measures in seconds: fields of `cost.schedule.prediction.PhaseTime`
# The order in which the measures of a phase are listed.
_ORDER = (*TIMES, "memory", "rounds", "bytes", "link bytes", "buckets", "algorithm", "collectives",
          "collective bytes", "ops")  # fmt: skip


def diff(a: Schedule, b: Schedule, times: tuple[Prediction, Prediction] | None) -> tuple[Change, ...]:
    """Compare two schedules.

    Args:
        a: The first schedule.
        b: The second schedule.
        times: The predictions of both, or None.

    Returns:
        All compared quantities, changed or not.
    """
    simulated_a, simulated_b = times or (None, None)
    before, after = _phases(a, simulated_a), _phases(b, simulated_b)
    changes = list(_changes("", _whole(a), _whole(b)))
    for name in dict.fromkeys([*before, *after]):
        changes += _changes(name, before.get(name, {}), after.get(name, {}))
    return tuple(changes)


def computations_text(before: Prediction, after: Prediction) -> str:
    """The phases whose exposed times refer to different computations; empty if there are none."""
    pairs = [
        (phase, next((other for other in after.phases if other.name == phase.name), phase))
        for phase in before.phases
    ]
    return ", ".join(
        f"phase {a.name} next to {timed(a.computation)} and {timed(b.computation)}"
        for a, b in pairs
        if a.computation != b.computation
    )


def _phases(schedule: Schedule, prediction: Prediction | None) -> dict[str, _Measures]:
    """The measures of each phase, by name."""
    measures = {phase.name: _phase_measures(phase, schedule) for phase in schedule.phases}
    for entry in memory(schedule):
        measures[entry.phase]["memory", ""] = entry.nbytes
    to_servers = Counter[str]()
    for (name, _), line in server_lines(schedule, None).items():
        to_servers[name] += line.sent
    for name, entries in measures.items():
        if to_servers[name]:
            entries["bytes", "to servers"] = to_servers[name]
        nbytes = [value for (measure, _), value in entries.items() if measure == "bytes"]
        entries["bytes", ""] = sum(value for value in nbytes if not isinstance(value, str))
    for phase_time in prediction.phases if prediction else ():
        entries = measures[phase_time.name]
        entries |= {(measure, ""): getattr(phase_time, measure) for measure in TIMES}
        entries |= {("link bytes", level): round(value) for level, value in phase_time.nbytes if value}
    return measures


def _changes(phase: str, before: _Measures, after: _Measures) -> Iterator[Change]:
    """The values of both schedules, in `_ORDER` for a phase."""
    keys = dict.fromkeys([*before, *after])
    for key in sorted(keys, key=lambda key: _ORDER.index(key[0])) if phase else keys:
        yield Change(phase, *key, before.get(key), after.get(key))


def _whole(schedule: Schedule) -> _Measures:
    """The properties of the whole schedule: plan, backend, passes and sizes of axes."""
    sizes = {("axis", axis.name): axis.size for axis in schedule.axes}
    texts = {"plan": schedule.plan, "backend": schedule.backend, "passes": schedule.pipeline or "none"}
    return {**{(measure, ""): text for measure, text in texts.items()}, **sizes}


def _phase_measures(phase: Phase, schedule: Schedule) -> _Measures:
    """The measures of the ops of a phase; rounds only if every collective is a chunk program."""
    collectives = [op for op in phase.ops if isinstance(op, Collective)]
    moved = Counter[str]()
    for op in collectives:
        moved.update({", ".join(entry.axes): entry.nbytes for entry in traffic(op, schedule)})
    by_kind = grouped(collectives, lambda op: f"{op.kind} {op.dtype.value} over {', '.join(op.axes)}")
    packed = {value.id: value.nbytes for value in phase.values}
    buckets = [packed[op.result] for op in phase.ops if isinstance(op, Pack)]
    measures: _Measures = {("bytes", f"over {axes}"): nbytes for axes, nbytes in moved.items()}
    rounds = _rounds(collectives, schedule)
    if collectives and rounds is not None:
        measures["rounds", ""] = rounds
    if buckets:
        measures |= {("buckets", "number"): len(buckets), ("buckets", "largest"): max(buckets)}
    for name, ops in by_kind.items():
        measures["algorithm", name] = ", ".join(dict.fromkeys(str(op.algorithm) for op in ops))
        measures |= {
            ("collectives", name): len(ops),
            ("collective bytes", name): sum(op.nbytes for op in ops),
        }
    counts: Mapping[str, int] = Counter(op.title for op in phase.ops if not isinstance(op, Collective))
    return measures | {("ops", title): count for title, count in counts.items()}


def _rounds(collectives: Sequence[Collective], schedule: Schedule) -> int | None:
    """The rounds of all collectives in sequence; None if one of them is native."""
    rounds_by_key: dict[tuple[object, ...], int | None] = {}
    total = 0
    for op in collectives:
        key = (op.kind, op.axes, str(op.algorithm), op.root)
        if key not in rounds_by_key:
            proof = prove_op(schedule, op)
            rounds_by_key[key] = proof.cost.rounds if proof else None
        rounds = rounds_by_key[key]
        if rounds is None:
            return None
        total += rounds
    return total
