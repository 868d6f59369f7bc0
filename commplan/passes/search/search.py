"""The search for the table of choices with the least predicted exposed time of a phase.

Units are searched one by one, the one with the most bytes first:

- each bucket size with the algorithms that are fastest alone;
- each algorithm with the best size;
- all sizes with the fastest algorithm of each kind;
- with the fastest algorithm of each kind, sizes near the best, and message sizes;
- with the best size, all programs.

This repeats until no single alternative is better, or the budget is spent. Then the search restarts from the
best table in which all units have the same algorithm, or two of them others than before, and with separate
buckets for stages that may share them. Among equally fast tables the one with the fewest collectives is
taken. The budget is a number of schedules, not of seconds, so every process of a job makes the same schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from commplan.ir.hints import Algorithm
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Phase, Schedule
from commplan.passes.base import OPEN, Choices, Pass, PassContext, StageChoice, StageKey
from commplan.passes.search.candidates import (
    algorithms,
    around,
    bucket_sizes,
    by_whether_they_split,
    message_sizes,
    programs,
    with_algorithm,
    with_one_level_changed,
)
from commplan.passes.search.remarks import Searched, remark
from commplan.passes.search.trials import Trials
from commplan.passes.search.units import Unit
from commplan.select.algorithm_search import Chooser

NEAR = 0.003  # of the exposed time: the simplest choice within this margin of the best is taken
HOPELESS = 1.5  # times the algorithm's best: a size slower than this and than the size before ends its sizes
DISTANT = 2.0  # times the best: all sizes are tried with the fastest algorithm of a kind that is no slower
CLOSE = 1.25  # times the best: sizes are refined with the fastest algorithm of a kind that is no slower
REVISITED = 1.5  # times the best: slower choices are not tried again after other units have moved
ORDERS = 2  # of levels, the fastest: in each of them single levels are changed
PROMISING = 1.25  # times the best: a slower table is not searched from
PAIRED = 3  # units, the largest, of which two are changed at once
KINDS = 6  # of algorithms, and of sizes, that are tried for each of the two


def choose(schedule: Schedule, passes: Sequence[Pass], context: PassContext) -> tuple[Choices, list[Choice]]:
    """The choices with the least exposed time for the collectives of `schedule`, and the remarks on them."""
    table, remarks = dict[StageKey, StageChoice](), list[Choice]()
    if context.costs is None or not any(p.name in ("bucket", "select") for p in passes):
        return {}, []
    for phase in schedule.phases:
        if any(isinstance(op, Collective) for op in phase.ops):
            search = _best_search(schedule, phase, passes, context)
            table |= search.table
            remarks += search.remarks()
    return table, remarks


def _best_search(schedule: Schedule, phase: Phase, passes: Sequence[Pass], context: PassContext) -> _Search:
    """The better of two searches: one with buckets that stages share, if they may, and one without."""
    assert context.costs is not None
    trials = Trials(schedule, phase, passes, context, context.costs)
    search = _Search(trials)
    search.run()
    if not trials.apart:
        return search
    separate = Trials(schedule, phase, passes, context, context.costs, trials.apart)
    separate.elsewhere, separate.work = trials.count, trials.work
    if separate.is_spent:
        return search
    separate_search = _Search(separate)
    shared: dict[tuple[object, ...], StageChoice] = {}
    for unit in search.units:  # the largest first
        shared.setdefault((unit.key.kind, unit.key.axes), search.table[unit.key])
    choices = {key: search.table.get(key) or shared.get((key.kind, key.axes), OPEN) for key in trials.apart}
    separate_search.begin_with({key: replace(choice, apart=True) for key, choice in choices.items()})
    separate_search.run()
    trials.elsewhere = len(separate.predictions)
    best, second = search, separate_search
    if separate_search.seconds < search.seconds * (1 - NEAR):
        best, second = second, best
    for key, tried in best.tried.items():
        if key in second.tried:
            tried[second.table[key]] = second.tried[key][second.table[key]]
    best.is_cut |= second.is_cut
    return best


class _Search:
    """The search of one phase.

    Attributes:
        table: the choices so far.
        seconds: that the phase with them is exposed.
        tried: for each unit, its choices that were tried with those of the other units as they were.
        is_cut: whether the budget ended it.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.units = trials, trials.units
        topology, candidates = trials.context.topology, trials.context.candidates
        self.chooser = Chooser(trials.schedule, trials.predictor, topology, candidates, explains=False)
        self.table: dict[StageKey, StageChoice] = dict(trials.start)
        self.tried: dict[StageKey, dict[StageChoice, Searched]] = {}
        self.is_cut = False

    @property
    def seconds(self) -> float:
        return self.trials.predictions[self.trials.key(self.table)].seconds if self.units else 0.0

    def begin_with(self, table: Choices) -> None:
        """Start from `table` if it is faster than the start."""
        predictions = [self.trials.predicted(each) for each in (self.table, table)]
        start, other = (math.inf if each is None else each.seconds for each in predictions)
        if other < start:
            self.table = dict(table)

    def run(self) -> None:
        """Descend from the start, and again from a table in which several units change their algorithm."""
        self._descend()
        start = self._joint()
        if start is not None:
            table, tried, limit = self.table, self.tried, self.seconds * (1 - NEAR)
            self.table, self.tried = start, {}
            self._descend()
            if self.seconds >= limit:
                self.table, self.tried = table, tried
        self.is_cut = self.trials.is_spent
        self._simplify()

    def _descend(self) -> None:
        for _ in range(3):
            before = dict(self.table)
            for unit in self.units:
                self._unit(unit)
            if self.table == before or len(self.units) == 1:
                return

    def _joint(self) -> dict[StageKey, StageChoice] | None:
        """The best table in which several units have other algorithms, with the best sizes tried.

        None if no such table is new and promising. A change may slow down a single unit but pay off for
        several: levels of one unit are pipelined with levels of another, but wait for collectives over all
        axes.
        """
        best, limit = None, self.seconds * PROMISING
        for moved in (*self._fastest_by_algorithm(), *self._pairs()):
            table = self.table | moved
            is_new = len(moved) > 1 and self.trials.key(table) not in self.trials.predictions
            prediction = self.trials.predicted(table) if is_new else None
            if prediction is not None and prediction.seconds <= limit:
                best, limit = table, prediction.seconds
        return best

    def _fastest_by_algorithm(self) -> Iterator[dict[StageKey, StageChoice]]:
        """For each algorithm, its fastest choice for each unit that can have it."""
        fastest = {
            unit.key: _fastest(self.tried.get(unit.key, {}), _name) for unit in self.units if unit.chooses
        }
        for name in dict.fromkeys(name for each in fastest.values() for name in each):
            yield {key: each[name].choice for key, each in fastest.items() if name in each}

    def _pairs(self) -> Iterator[dict[StageKey, StageChoice]]:
        """The fastest choices of two large units, of each kind of algorithm, and of each size."""
        for kind in (_kind, _size):
            fastest = [
                [(unit.key, each.choice) for each in _fastest(self.tried.get(unit.key, {}), kind).values()]
                for unit in self.units[:PAIRED]
            ]
            for first, second in itertools.combinations(fastest, 2):
                yield from map(dict, itertools.product(first[:KINDS], second[:KINDS]))

    def _unit(self, unit: Unit) -> None:
        """Search one unit, the choices of the others as they are."""
        ways, sizes = algorithms(unit, self.chooser), bucket_sizes(unit)
        tried: dict[StageChoice, Searched] = {}
        current = self.table.get(unit.key, OPEN)

        def attempt(choice: StageChoice) -> Searched | None:
            prediction = None if choice in tried else self.trials.predicted({**self.table, unit.key: choice})
            if prediction is not None:
                order = ways.index(choice.algorithm) if choice.algorithm in ways else len(ways)
                tried[choice] = prediction._replace(order=order, choice=choice)
            return tried.get(choice)

        def best() -> StageChoice:
            return min(tried.values(), key=lambda each: (each.seconds, each.order)).choice

        def leaders(limit: float) -> list[Searched]:
            """The fastest of each kind of algorithm, without those slower than `limit` times the best."""
            slowest = limit * tried[best()].seconds
            return [each for each in _fastest(tried, _kind).values() if each.seconds <= slowest]

        def orders() -> list[Algorithm]:
            """The hierarchies, by order of levels, the fastest first."""
            ranked = sorted(tried.values(), key=lambda each: each.seconds)
            algorithms = [each.choice.algorithm for each in ranked if _name(each.choice) == "hierarchical"]
            return list(dict.fromkeys(each for each in algorithms if each is not None))

        def attempt_sizes(choice: StageChoice) -> None:
            fastest = math.inf
            for similar in by_whether_they_split(unit, sizes):
                larger = math.inf
                for size in similar:
                    result = attempt(replace(choice, bucket=size))
                    if result is None or result.seconds > max(larger, HOPELESS * fastest):
                        break
                    larger, fastest = result.seconds, min(fastest, result.seconds)

        def refine(choice: StageChoice) -> None:
            """Try sizes of buckets near the best with the algorithm of `choice`, until none is better."""
            last = None
            while choice != last and not self.trials.is_spent:
                last = choice
                for size in around(unit, last):
                    attempt(replace(best_of(last.algorithm), bucket=size))
                choice = best_of(last.algorithm)

        def best_of(algorithm: Algorithm | None) -> StageChoice:
            alike = [each for each in tried.values() if each.choice.algorithm == algorithm]
            return min(alike, key=lambda each: each.seconds).choice

        attempt(current)
        before = self.tried.get(unit.key, {}).values()
        if before:  # of the alternatives, only those that were close with the other units as they were
            limit = REVISITED * min(each.seconds for each in before)
            for each in before:
                if each.seconds <= limit:
                    attempt(each.choice)
        else:
            attempt_sizes(current)
            for algorithm in ways if tried else ():
                attempt(with_algorithm(best(), algorithm))
            for order in orders()[:ORDERS] if tried else ():
                for algorithm in with_one_level_changed(unit, order, self.chooser):
                    attempt(replace(best_of(order), algorithm=algorithm))
            for leader in leaders(DISTANT) if tried else ():
                attempt_sizes(replace(current, algorithm=leader.choice.algorithm))
        if not tried:
            return
        for leader in leaders(CLOSE):
            refine(leader.choice)
        for leader in leaders(CLOSE):
            for chunk in message_sizes(unit, leader.choice, self.chooser):
                attempt(replace(leader.choice, chunk=chunk))
        last = None
        while best() != last and not self.trials.is_spent:
            last = best()
            refine(last)
            for algorithm in dict.fromkeys((*ways, *programs(unit, self.chooser))):
                attempt(with_algorithm(best(), algorithm))
            for chunk in message_sizes(unit, best(), self.chooser):
                attempt(replace(best(), chunk=chunk))
        self.table[unit.key] = best()
        self.tried[unit.key] = tried

    def _simplify(self) -> None:
        """Take the simplest of the choices that are as good."""
        limit = self.seconds * (1 + NEAR)
        for unit in self.units:
            tried = self.tried.get(unit.key, {})
            near = [each for each in tried.values() if each.seconds <= limit]
            for each in sorted(near, key=lambda each: each[1:4]):
                prediction = self.trials.predicted({**self.table, unit.key: each.choice})
                if prediction is not None and prediction.seconds <= limit:
                    self.table[unit.key] = each.choice
                    break
        for unit in self.units:
            choice = self.table.get(unit.key, OPEN)
            if choice in self.tried.get(unit.key, {}):
                each = self.tried[unit.key][choice]
                self.tried[unit.key][choice] = each._replace(seconds=self.seconds)

    def remarks(self) -> list[Choice]:
        """The choice for each unit, and the best of the rest."""
        trials = self.trials
        computation = "the computation" if trials.context.step is not None else "the assumed computation"
        scope = f"next to {computation}" if trials.ready.seconds else "of the phase"
        how = "the budget is spent" if self.is_cut else "no single alternative of those tried is faster"
        why = f"the least time exposed {scope} of {trials.count} schedules tried, not all there are: {how}"
        source = trials.predictor.in_words("model")
        return [
            remark(unit, self.table[unit.key], self.tried[unit.key], why, source)
            for unit in self.units
            if self.tried.get(unit.key)
        ]


def _fastest(
    tried: Mapping[StageChoice, Searched], kind: Callable[[StageChoice], str]
) -> dict[str, Searched]:
    """The fastest of each kind, the fastest kind first."""
    result: dict[str, Searched] = {}
    for each in sorted(tried.values(), key=lambda each: (each.seconds, each.order)):
        result.setdefault(kind(each.choice), each)
    return result


def _name(choice: StageChoice) -> str:
    """The name of its algorithm: `hierarchical` for any order of levels, "" for the fastest of each."""
    return choice.algorithm.name if choice.algorithm is not None else ""


def _size(choice: StageChoice) -> str:
    """The size of its buckets."""
    return str(choice.bucket)


def _kind(choice: StageChoice) -> str:
    """The kind of its algorithm: the backend's own, each its own, a chunk program, an order of levels, or one
    in which one level is changed."""
    algorithm = choice.algorithm
    if algorithm is not None and any(arg.key is not None for arg in algorithm.args):
        return "one level changed"
    return str(algorithm or "") if _name(choice) in ("", "native", "hierarchical") else "program"
