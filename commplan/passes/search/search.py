"""The search: the passes run with tables of choices, and the table whose phase is predicted to be exposed
for the least time is taken.

Unit by unit, the one with the most bytes first: each size of buckets with algorithms that are the fastest
alone, each algorithm with the best size, the sizes once more with the best algorithms, and the sizes around
the best. Again, until no single alternative of those tried is better, or the budget is spent. The budget is
counted in schedules and not in seconds, so that every process of a job makes the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commplan.cost.predictor import Predictor
from commplan.cost.schedule.prediction import predict_exposed
from commplan.cost.schedule.step import readiness
from commplan.ir.plan import Algorithm
from commplan.ir.remark import Alternative, Choice
from commplan.ir.schedule import Collective, Phase, Schedule
from commplan.ir.types import sized
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.pipeline.base import Choices, Context, Pass, StageChoice, StageKey
from commplan.passes.search.candidates import algorithms, bucket_sizes, least_bucket
from commplan.passes.search.units import Unit, units
from commplan.select.algorithm_search import Chooser, rounded

SCHEDULES = 160  # that are predicted for a phase at most
WORK = 100_000  # ops and leaves of all of them together, about
NEAR = 0.005  # of the exposed time: what is no slower than this is as good, and the simpler one is taken
SHOWN = 6  # runners-up that are kept
BEST = 3  # algorithms with which all sizes are tried


class Searched(NamedTuple):
    """A table that was tried for a unit. order: simpler ones first. operations: collectives of the phase."""

    seconds: float
    operations: int
    nbytes: float
    order: int
    choice: StageChoice


def choose(schedule: Schedule, passes: Sequence[Pass], context: Context) -> tuple[Choices, list[Choice]]:
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
    """The search of one phase. known: what was predicted with a table."""

    def __init__(
        self, schedule: Schedule, phase: Phase, passes: Sequence[Pass], context: Context, predictor: Predictor
    ) -> None:
        self.schedule, self.phase = replace(schedule, phases=(phase,), choices=()), phase
        self.phases, self.passes, self.context, self.predictor = schedule.phases, passes, context, predictor
        packed = self._after([pass_ for pass_ in passes if isinstance(pass_, BucketPass)], {})
        self.units = units(packed, packed.phases[0], passes)
        size = len(packed.phases[0].ops) + sum(len(value.leaves) for value in packed.phases[0].values)
        self.budget = max(4, min(SCHEDULES, WORK // max(1, size)))
        self.table: dict[StageKey, StageChoice] = {}
        self.known: dict[tuple[object, ...], Searched] = {}
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
        current = self.table.get(unit.key, StageChoice())

        def attempt(bucket: int | None, algorithm: Algorithm | None) -> None:
            choice = StageChoice(bucket, algorithm)
            prediction = None if choice in tried else self._predicted(unit, choice)
            if prediction is not None:
                order = ways.index(algorithm) if algorithm in ways else len(ways)
                tried[choice] = prediction._replace(order=order, choice=choice)

        def best() -> StageChoice:
            return min(tried.values(), key=lambda each: (each.seconds, each.order)).choice

        attempt(current.bucket, current.algorithm)
        for size in sizes:
            attempt(size, current.algorithm)
        if not tried:
            return
        for algorithm in ways:
            attempt(best().bucket, algorithm)
        ranked = sorted(tried.values(), key=lambda each: each.seconds)
        for algorithm in list(dict.fromkeys(each.choice.algorithm for each in ranked))[:BEST]:
            for size in sizes:
                attempt(size, algorithm)
        self._refine(unit, tried, attempt)
        limit = min(each.seconds for each in tried.values()) * (1 + NEAR)
        near = [each for each in tried.values() if each.seconds <= limit]
        self.table[unit.key] = min(near, key=lambda each: each[1:4]).choice
        self.tried[unit.key] = tried

    def _refine(
        self, unit: Unit, tried: dict[StageChoice, Searched],
        attempt: Callable[[int | None, Algorithm | None], None],
    ) -> None:  # fmt: skip
        """Sizes around the best one, as long as one of them is better."""
        last = None
        while unit.packs and not self.is_spent:
            best = min(tried.values(), key=lambda each: (each.seconds, each.order)).choice
            if best == last or best.bucket is None:
                return
            last = best
            for size in (
                best.bucket * 2,
                best.bucket * 3 // 2,
                -(-best.bucket * 3 // 4),
                -(-best.bucket // 2),
            ):
                if least_bucket(unit) <= size <= unit.nbytes:
                    attempt(size, best.algorithm)

    def _predicted(self, unit: Unit, choice: StageChoice) -> Searched | None:
        """The phase with `choice` for `unit`; None where the budget is spent."""
        table = {**self.table, unit.key: choice}
        key = tuple(sorted(table.items(), key=str))
        if key not in self.known:
            if self.is_spent:
                return None
            after = self._after(self.passes, table)
            (phase,) = after.phases
            whole = replace(after, phases=tuple(phase if p is self.phase else p for p in self.phases))
            exposed, moved = predict_exposed(whole, phase, self.predictor, self.ready, self.measured)
            count = sum(isinstance(op, Collective) for op in phase.ops)
            self.known[key] = Searched(_digits(exposed), count, _digits(moved), 0, choice)
        return self.known[key]

    def _after(self, passes: Sequence[Pass], table: Choices) -> Schedule:
        context = replace(self.context, choices=table, explains=False)
        schedule = self.schedule
        for pass_ in passes:
            schedule = pass_.run(schedule, context)
        return schedule

    def remarks(self) -> list[Choice]:
        """What was chosen for each unit, and the best of the rest."""
        return [self._remark(unit) for unit in self.units if self.tried.get(unit.key)]

    def _remark(self, unit: Unit) -> Choice:
        tried, choice = self.tried[unit.key], self.table[unit.key]
        taken = tried[choice]
        runners_up: dict[tuple[object, float], Searched] = {}  # one for each algorithm and time
        for each in sorted(tried.values(), key=lambda each: (each.seconds, each.order)):
            runners_up.setdefault((each.choice.algorithm, each.seconds), each)
        runners_up.pop((choice.algorithm, taken.seconds), None)
        alternatives = tuple(
            Alternative(_words(each.choice, unit), rounded(each.seconds))
            for each in [*runners_up.values()][:SHOWN]
        )
        op = unit.collective
        text = f"{_words(choice, unit)} for {op.kind} of {sized(unit.nbytes)} over {', '.join(op.axes)}"
        where = "beside the computation" if self.ready.seconds else "of the phase"
        count = len(self.known)
        how = "the budget is spent" if self.is_spent else "no single alternative of those tried is faster"
        why = f"the least time exposed {where} of {count} schedules tried, not all there are: {how}"
        source = self.predictor.in_words("model")
        return Choice("search", text, why, op.span, (), rounded(taken.seconds), source, alternatives)


def _words(choice: StageChoice, unit: Unit) -> str:
    """`ring in buckets of 25 MiB`: what is chosen, as far as it was open."""
    parts = list[str]()
    if unit.chooses:
        parts.append(str(choice.algorithm) if choice.algorithm else "each by the fastest algorithm alone")
    if unit.packs:
        whole = choice.bucket is not None and choice.bucket >= unit.nbytes
        size = "the usual size" if choice.bucket is None else f"up to {sized(choice.bucket)}"
        parts.append("in one bucket" if whole else f"in buckets of {size}")
    return " ".join(parts)


def _digits(number: float) -> float:
    """To six digits: no machine's last bit decides."""
    return float(f"{number:.5e}")
