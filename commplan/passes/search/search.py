"""The search: the passes run with tables of choices, and the table whose phase is predicted to be exposed
for the least time is taken.

Unit by unit, the one with the most bytes first: each size of buckets with algorithms that are the fastest
alone, each algorithm with the best size, the sizes once more with the best algorithms; then sizes of messages
and the sizes of buckets around the best. Again, until no single alternative of those tried is better, or the
budget is spent. The budget is counted in schedules and not in seconds, so that every process of a job makes
the same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from commplan.cost.predictor import Predictor
from commplan.cost.schedule.prediction import predict_exposed
from commplan.cost.schedule.step import readiness
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Phase, Schedule
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.pipeline.base import OPEN, Choices, Pass, PassContext, StageChoice, StageKey
from commplan.passes.search.candidates import algorithms, around, bucket_sizes, message_sizes
from commplan.passes.search.remarks import Searched, remark
from commplan.passes.search.units import Unit, units
from commplan.select.algorithm_search import Chooser

SCHEDULES = 160  # that are predicted for a phase at most
WORK = 100_000  # ops and leaves of all of them together, about
NEAR = 0.005  # of the exposed time: what is no slower than this is as good, and the simpler one is taken
BEST = 3  # algorithms with which all sizes are tried


def choose(schedule: Schedule, passes: Sequence[Pass], context: PassContext) -> tuple[Choices, list[Choice]]:
    """The choices with the least exposed time for the collectives of `schedule`, and the remarks on them."""
    table, remarks = dict[StageKey, StageChoice](), list[Choice]()
    if context.costs is None or not any(p.name in ("bucket", "select") for p in passes):
        return {}, []
    for phase in schedule.phases:
        if any(isinstance(op, Collective) for op in phase.ops):
            search = _Search(schedule, phase, passes, context, context.costs)
            search.run()
            table |= search.table
            remarks += search.remarks()
    return table, remarks


class _Search:
    """The search of one phase. known: what was predicted with a table. packed: the phase as it is before
    algorithms are settled, by sizes of buckets."""

    def __init__(
        self,
        schedule: Schedule,
        phase: Phase,
        passes: Sequence[Pass],
        context: PassContext,
        predictor: Predictor,
    ) -> None:
        self.schedule, self.phase = replace(schedule, phases=(phase,), choices=()), phase
        self.phases, self.passes, self.context, self.predictor = schedule.phases, passes, context, predictor
        packed = self._after(self.schedule, [pass_ for pass_ in passes if isinstance(pass_, BucketPass)], {})
        self.units = units(packed, packed.phases[0], passes)
        size = len(packed.phases[0].ops) + sum(len(value.leaves) for value in packed.phases[0].values)
        self.budget = max(4, min(SCHEDULES, WORK // max(1, size)))
        self.table: dict[StageKey, StageChoice] = {}
        self.known: dict[tuple[StageChoice, ...], Searched] = {}
        self.packed: dict[tuple[int | None, ...], Schedule] = {}
        self.tried: dict[StageKey, dict[StageChoice, Searched]] = {}
        self.measured = context.calibration.input if context.calibration else None
        self.ready = readiness(schedule, phase, predictor, context.step, context.order)

    def run(self) -> None:
        for _ in range(3):
            before = dict(self.table)
            for unit in self.units:
                self._unit(unit)
            if self.table == before or len(self.units) == 1:
                return

    @property
    def is_spent(self) -> bool:
        return len(self.known) >= self.budget

    def _unit(self, unit: Unit) -> None:
        """Search one unit, the choices of the others as they are."""
        chooser = Chooser(self.schedule, self.predictor, self.context.topology, explains=False)
        ways, sizes = algorithms(unit, chooser), bucket_sizes(unit)
        tried: dict[StageChoice, Searched] = {}
        current = self.table.get(unit.key, OPEN)

        def attempt(choice: StageChoice) -> None:
            prediction = None if choice in tried else self._predicted(unit, choice)
            if prediction is not None:
                order = ways.index(choice.algorithm) if choice.algorithm in ways else len(ways)
                tried[choice] = prediction._replace(order=order, choice=choice)

        def best() -> StageChoice:
            return min(tried.values(), key=lambda each: (each.seconds, each.order)).choice

        attempt(current)
        for size in sizes:
            attempt(replace(current, bucket=size))
        if not tried:
            return
        for algorithm in ways:
            attempt(replace(best(), algorithm=algorithm))
        ranked = sorted(tried.values(), key=lambda each: each.seconds)
        for algorithm in list(dict.fromkeys(each.choice.algorithm for each in ranked))[:BEST]:
            for size in sizes:
                attempt(StageChoice(size, algorithm, current.chunk))
        last = None
        while best() != last and not self.is_spent:
            last = best()
            for chunk in message_sizes(unit, last, chooser):
                attempt(replace(last, chunk=chunk))
            for size in around(unit, last):
                attempt(replace(best(), bucket=size))
        limit = min(each.seconds for each in tried.values()) * (1 + NEAR)
        near = [each for each in tried.values() if each.seconds <= limit]
        self.table[unit.key] = min(near, key=lambda each: each[1:4]).choice
        self.tried[unit.key] = tried

    def _predicted(self, unit: Unit, choice: StageChoice) -> Searched | None:
        """The phase with `choice` for `unit`; None if the budget is spent."""
        table = {**self.table, unit.key: choice}
        key = tuple(table.get(each.key, OPEN) for each in self.units)
        if key not in self.known:
            if self.is_spent:
                return None
            after = self._compiled(table)
            (phase,) = after.phases
            whole = replace(after, phases=tuple(phase if p is self.phase else p for p in self.phases))
            exposed, moved = predict_exposed(whole, phase, self.predictor, self.ready, self.measured)
            count = sum(isinstance(op, Collective) for op in phase.ops)
            self.known[key] = Searched(_digits(exposed), count, _digits(moved), 0, choice)
        return self.known[key]

    def _compiled(self, table: Choices) -> Schedule:
        """The phase after all passes; what precedes `decompose` is computed once for the same buckets."""
        names = [pass_.name for pass_ in self.passes]
        first = names.index("decompose") if "decompose" in names else 0
        sizes = tuple(table.get(unit.key, OPEN).bucket for unit in self.units)
        if sizes not in self.packed:
            self.packed[sizes] = self._after(self.schedule, self.passes[:first], table)
        return self._after(self.packed[sizes], self.passes[first:], table)

    def _after(self, schedule: Schedule, passes: Sequence[Pass], table: Choices) -> Schedule:
        context = replace(self.context, choices=table, explains=False)
        for pass_ in passes:
            schedule = pass_.run(schedule, context)
        return schedule

    def remarks(self) -> list[Choice]:
        """The choice for each unit, and the best of the rest."""
        scope = "beside the computation" if self.ready.seconds else "of the phase"
        how = "the budget is spent" if self.is_spent else "no single alternative of those tried is faster"
        count = len(self.known)
        why = f"the least time exposed {scope} of {count} schedules tried, not all there are: {how}"
        source = self.predictor.in_words("model")
        return [
            remark(unit, self.table[unit.key], self.tried[unit.key], why, source)
            for unit in self.units
            if self.tried.get(unit.key)
        ]


def _digits(number: float) -> float:
    """To six digits: no machine's last bit decides."""
    return float(f"{number:.5e}")
