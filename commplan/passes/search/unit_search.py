"""The search for the choice of one unit, with the choices of the other units unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from commplan.ir.hints import Algorithm
from commplan.passes.base import OPEN, Choices, StageChoice
from commplan.passes.search.candidates import (
    algorithms,
    around,
    bucket_sizes,
    message_sizes,
    programs,
    sizes_by_split,
    with_algorithm,
    with_one_level_changed,
)
from commplan.passes.search.remarks import Searched
from commplan.passes.search.trials import Trials
from commplan.passes.search.units import Unit
from commplan.select.algorithm_search import Chooser

# The following limits are multiples of the best time.
# An algorithm tries no smaller sizes after one that is slower than this, and than the size before.
HOPELESS = 1.5
# The fastest algorithm of each kind tries all sizes, if it is not slower than this.
DISTANT = 2.0
# The fastest algorithm of each kind refines its sizes, if it is not slower than this.
CLOSE = 1.25
# Choices that are slower than this are not tried again after choices of other units have changed.
REVISITED = 1.5

ORDERS = 2  # number of orders of levels, the fastest, whose levels are changed one by one


class UnitSearch:
    """The search of one unit.

    Args:
        unit: The unit.
        trials: Predicts tables.
        chooser: Predicts the time of one collective alone.
        table: The choices of all units.

    Attributes:
        algorithms: The algorithms to try, in order of preference.
        tried: The choices of the unit that were tried, with their predictions.
    """

    def __init__(self, unit: Unit, trials: Trials, chooser: Chooser, table: Choices) -> None:
        self.unit, self.trials, self.chooser, self.table = unit, trials, chooser, table
        self.algorithms = algorithms(unit, chooser)
        self.tried: dict[StageChoice, Searched] = {}

    def run(self, earlier: Collection[Searched]) -> StageChoice | None:
        """Search, and return the best choice; None if the budget was spent before.

        Args:
            earlier: The choices that were tried when other units had other choices. If there are any, only
                those that were close to the best are tried again (`REVISITED`).
        """
        start = self.table.get(self.unit.key, OPEN)
        self._try(start)
        if earlier:
            limit = REVISITED * min(each.seconds for each in earlier)
            for each in earlier:
                if each.seconds <= limit:
                    self._try(each.choice)
        else:
            self._try_all(start)
        if not self.tried:
            return None
        # Refine the sizes of the fastest choice of each kind of algorithm.
        for leader in self._leaders(CLOSE):
            self._refine_size(leader.choice)
        for leader in self._leaders(CLOSE):
            for chunk in message_sizes(self.unit, leader.choice, self.chooser):
                self._try(replace(leader.choice, chunk=chunk))
        # Vary one option of the best choice at a time, until no alternative is better.
        last = None
        while self._best() != last and not self.trials.is_spent:
            last = self._best()
            self._refine_size(last)
            for algorithm in dict.fromkeys((*self.algorithms, *programs(self.unit, self.chooser))):
                self._try(with_algorithm(self._best(), algorithm))
            for chunk in message_sizes(self.unit, self._best(), self.chooser):
                self._try(replace(self._best(), chunk=chunk))
        return self._best()

    def _try(self, choice: StageChoice) -> Searched | None:
        """Predict a choice, and return the prediction; None if it is new and the budget is spent."""
        if choice not in self.tried:
            prediction = self.trials.predicted({**self.table, self.unit.key: choice})
            if prediction is not None:
                is_listed = choice.algorithm in self.algorithms
                order = self.algorithms.index(choice.algorithm) if is_listed else len(self.algorithms)
                self.tried[choice] = prediction._replace(order=order, choice=choice)
        return self.tried.get(choice)

    def _try_all(self, start: StageChoice) -> None:
        """Try all algorithms with the best size, and all sizes with the fastest algorithm of each kind."""
        self._try_sizes(start)
        if not self.tried:
            return
        for algorithm in self.algorithms:
            self._try(with_algorithm(self._best(), algorithm))
        for hierarchy in self._hierarchies()[:ORDERS]:
            for algorithm in with_one_level_changed(self.unit, hierarchy, self.chooser):
                self._try(replace(self._best_of(hierarchy), algorithm=algorithm))
        for leader in self._leaders(DISTANT):
            self._try_sizes(replace(start, algorithm=leader.choice.algorithm))

    def _try_sizes(self, choice: StageChoice) -> None:
        """Try bucket sizes, from large to small, until they are hopeless (`HOPELESS`).

        Sizes that split leaves are tried after the others, even if these were hopeless.
        """
        fastest = math.inf
        for sizes in sizes_by_split(self.unit, bucket_sizes(self.unit)):
            previous = math.inf
            for size in sizes:
                result = self._try(replace(choice, bucket=size))
                if result is None or result.seconds > max(previous, HOPELESS * fastest):
                    break
                previous, fastest = result.seconds, min(fastest, result.seconds)

    def _refine_size(self, choice: StageChoice) -> None:
        """Try bucket sizes near the best with the algorithm of `choice`, until none is better."""
        last = None
        while choice != last and not self.trials.is_spent:
            last = choice
            for size in around(self.unit, last):
                self._try(replace(self._best_of(last.algorithm), bucket=size))
            choice = self._best_of(last.algorithm)

    def _best(self) -> StageChoice:
        """The fastest choice that was tried."""
        return min(self.tried.values(), key=lambda each: (each.seconds, each.order)).choice

    def _best_of(self, algorithm: Algorithm | None) -> StageChoice:
        """The fastest choice with `algorithm` that was tried; there is at least one."""
        candidates = [each for each in self.tried.values() if each.choice.algorithm == algorithm]
        return min(candidates, key=lambda each: each.seconds).choice

    def _leaders(self, limit: float) -> list[Searched]:
        """The fastest of each kind of algorithm, without those slower than `limit` times the best."""
        slowest = limit * self.tried[self._best()].seconds
        return [each for each in fastest_by(self.tried, kind_of).values() if each.seconds <= slowest]

    def _hierarchies(self) -> list[Algorithm]:
        """The hierarchies that were tried, one for each order of levels, the fastest first."""
        ranked = sorted(self.tried.values(), key=lambda each: each.seconds)
        hierarchies = [
            each.choice.algorithm for each in ranked if algorithm_name(each.choice) == "hierarchical"
        ]
        return list(dict.fromkeys(each for each in hierarchies if each is not None))


def fastest_by(
    tried: Mapping[StageChoice, Searched], kind: Callable[[StageChoice], str]
) -> dict[str, Searched]:
    """The fastest choice of each kind, the fastest kind first. `kind` returns the kind of a choice."""
    result: dict[str, Searched] = {}
    for each in sorted(tried.values(), key=lambda each: (each.seconds, each.order)):
        result.setdefault(kind(each.choice), each)
    return result


def algorithm_name(choice: StageChoice) -> str:
    """The name of the algorithm: `hierarchical` for any order of levels, "" for None."""
    return choice.algorithm.name if choice.algorithm is not None else ""


def size_of(choice: StageChoice) -> str:
    """The bucket size, as text."""
    return str(choice.bucket)


def kind_of(choice: StageChoice) -> str:
    """The kind of the algorithm, as text.

    The backend's own algorithm, None and each order of levels are separate kinds. All chunk programs are one
    kind, and so are all hierarchies with an algorithm for a level.
    """
    algorithm = choice.algorithm
    if algorithm is not None and any(arg.key is not None for arg in algorithm.args):
        return "one level changed"
    return str(algorithm or "") if algorithm_name(choice) in ("", "native", "hierarchical") else "program"
