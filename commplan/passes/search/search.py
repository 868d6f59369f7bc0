"""The search for the choices with the least predicted exposed time of a phase.

A table has one choice for each unit, which is a stage or several that share buckets. Units are searched one
by one, the one with the most bytes first. The search of a unit (`unit_search`) tries:

- each bucket size with the algorithms that are fastest alone;
- each algorithm with the best size;
- all sizes with the fastest algorithm of each kind;
- with the fastest algorithm of each kind, sizes near the best, and message sizes;
- with the best size, all programs.

This repeats until no single alternative is better, at most three times, or until the budget is spent. Then
the search restarts from the best table that gives all units the same algorithm, or two units others than
before. If stages share buckets, a second search gives them separate ones.

Among equally fast tables the one with the fewest collectives is taken. The budget is a number of schedules,
not of seconds, so every process of a job makes the same schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Phase, Schedule
from commplan.passes.base import OPEN, Choices, Pass, PassContext, StageChoice, StageKey
from commplan.passes.search.remarks import Searched, remark
from commplan.passes.search.trials import Trials
from commplan.passes.search.unit_search import UnitSearch, algorithm_name, fastest_by, kind_of, size_of
from commplan.passes.search.units import Unit
from commplan.select.algorithm_search import Chooser

NEAR = 0.003  # fraction of the exposed time; the simplest choice within this margin of the best is selected
PROMISING = 1.25  # tables slower than this multiple of the best are not a start of a search
PAIRED = 3  # number of units, the largest, that are changed in pairs
KINDS = 6  # maximum number of algorithms, and of sizes, to try for each unit of a pair
ROUNDS = 3  # maximum number of times that all units are searched one by one


def choose(schedule: Schedule, passes: Sequence[Pass], context: PassContext) -> tuple[Choices, list[Choice]]:
    """Search the choices with the least exposed time for the collectives of all phases.

    Args:
        schedule: The schedule.
        passes: The remaining passes, which read the choices.
        context: The context of the passes.

    Returns:
        The choices and the remarks on them. Both are empty without a cost model, and if neither `bucket` nor
        `select` remains.
    """
    table: dict[StageKey, StageChoice] = {}
    remarks: list[Choice] = []
    if context.costs is None or not any(pass_.name in ("bucket", "select") for pass_ in passes):
        return {}, []
    for phase in schedule.phases:
        if any(isinstance(op, Collective) for op in phase.ops):
            search = _best_search(schedule, phase, passes, context)
            table |= search.table
            remarks += search.remarks()
    return table, remarks


def _best_search(schedule: Schedule, phase: Phase, passes: Sequence[Pass], context: PassContext) -> _Search:
    """The better of two searches: one with buckets that stages share, if they may, and one without.

    `context` has costs.
    """
    assert context.costs is not None
    trials = Trials(schedule, phase, passes, context, context.costs)
    search = _Search(trials)
    search.run()
    if not trials.separate:
        return search

    # The second search begins with the results of the first, or without choices if they are slower. A stage
    # that shared the buckets of another has the choice of the largest unit of the same kind and axes.
    separate = Trials(schedule, phase, passes, context, context.costs, trials.separate)
    separate.elsewhere, separate.work = trials.count, trials.work
    if separate.is_spent:
        return search
    separate_search = _Search(separate)
    shared: dict[tuple[object, ...], StageChoice] = {}
    for unit in search.units:  # the largest first
        shared.setdefault((unit.key.kind, unit.key.axes), search.table[unit.key])
    choices = {
        key: search.table.get(key) or shared.get((key.kind, key.axes), OPEN) for key in trials.separate
    }
    separate_search.begin_with({key: replace(choice, separate=True) for key, choice in choices.items()})
    separate_search.run()
    trials.elsewhere = len(separate.predictions)

    # The remarks on the better search contain the result of the other.
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
        trials: Predicts tables, and has the budget.
        units: The open choices, by descending bytes.
        chooser: Predicts the time of one collective alone.
        table: The choices so far.
        tried: For each unit, the choices that its last search tried with the choices of the other units at
            that time.
        is_cut: Whether the budget ended the search.
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
        """The exposed seconds of the phase with the choices of `table`, which were tried; 0 without units."""
        return self.trials.predictions[self.trials.key(self.table)].seconds if self.units else 0.0

    def begin_with(self, table: Choices) -> None:
        """Start from `table` if it is faster than the initial table."""
        predictions = [self.trials.predicted(candidate) for candidate in (self.table, table)]
        initial_seconds, seconds = (math.inf if each is None else each.seconds for each in predictions)
        if seconds < initial_seconds:
            self.table = dict(table)

    def run(self) -> None:
        """Descend from the start, and again from a table that changes the algorithms of several units."""
        self._descend()
        joint = self._joint()
        if joint is not None:
            table, tried, limit = self.table, self.tried, self.seconds * (1 - NEAR)
            self.table, self.tried = joint, {}
            self._descend()
            if self.seconds >= limit:
                self.table, self.tried = table, tried
        self.is_cut = self.trials.is_spent
        self._simplify()

    def _descend(self) -> None:
        """Search all units one by one, until no choice changes."""
        for _ in range(ROUNDS):
            before = dict(self.table)
            for unit in self.units:
                self._search_unit(unit)
            if self.table == before or len(self.units) == 1:
                return

    def _joint(self) -> dict[StageKey, StageChoice] | None:
        """The best new table that changes the choices of several units, to others that were tried.

        None without a promising table (`PROMISING`). A change may slow down a single unit but pay off for
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
        """Yield, for each algorithm, its fastest choice for each unit for which it was tried."""
        fastest = {
            unit.key: fastest_by(self.tried.get(unit.key, {}), algorithm_name)
            for unit in self.units
            if unit.chooses
        }
        for name in dict.fromkeys(name for by_name in fastest.values() for name in by_name):
            yield {key: by_name[name].choice for key, by_name in fastest.items() if name in by_name}

    def _pairs(self) -> Iterator[dict[StageKey, StageChoice]]:
        """Yield choices for two large units: the fastest of each kind of algorithm, and of each size."""
        for kind in (kind_of, size_of):
            fastest = [
                [(unit.key, each.choice) for each in fastest_by(self.tried.get(unit.key, {}), kind).values()]
                for unit in self.units[:PAIRED]
            ]
            for first, second in itertools.combinations(fastest, 2):
                yield from map(dict, itertools.product(first[:KINDS], second[:KINDS]))

    def _search_unit(self, unit: Unit) -> None:
        """Search one unit, with the choices of the others unchanged."""
        search = UnitSearch(unit, self.trials, self.chooser, self.table)
        choice = search.run(self.tried.get(unit.key, {}).values())
        if choice is not None:
            self.table[unit.key] = choice
            self.tried[unit.key] = search.tried

    def _simplify(self) -> None:
        """Replace choices by simpler ones that are nearly as fast (`NEAR`).

        Simpler are fewer collectives, then fewer bytes, then the order of the candidates.
        """
        limit = self.seconds * (1 + NEAR)
        for unit in self.units:
            tried = self.tried.get(unit.key, {})
            near = [each for each in tried.values() if each.seconds <= limit]
            for each in sorted(near, key=lambda each: (each.operations, each.nbytes, each.order)):
                prediction = self.trials.predicted({**self.table, unit.key: each.choice})
                if prediction is not None and prediction.seconds <= limit:
                    self.table[unit.key] = each.choice
                    break
        # The remarks show the time of the final table for all choices in it.
        for unit in self.units:
            choice = self.table.get(unit.key, OPEN)
            if choice in self.tried.get(unit.key, {}):
                each = self.tried[unit.key][choice]
                self.tried[unit.key][choice] = each._replace(seconds=self.seconds)

    def remarks(self) -> list[Choice]:
        """The remarks on the choice of each unit, with the fastest alternatives that were tried."""
        trials = self.trials
        computation = "the computation" if trials.context.step is not None else "the assumed computation"
        scope = f"next to {computation}" if trials.ready.seconds else "of the phase"
        how = "the budget is spent" if self.is_cut else "no single alternative of those tried is faster"
        why = f"the least time exposed {scope} of {trials.count} schedules tried, not of all: {how}"
        source = trials.predictor.in_words("model")
        return [
            remark(unit, self.table[unit.key], self.tried[unit.key], why, source)
            for unit in self.units
            if self.tried.get(unit.key)
        ]
