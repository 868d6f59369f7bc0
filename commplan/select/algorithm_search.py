"""Searches for the fastest algorithm of a collective, for the passes `bucket`, `decompose` and `select`.

A `Predictor` predicts the time of every candidate. The fastest is selected, and among those within
`TIE_MARGIN` of it the simplest. The predicted time includes costs beyond the links: rounds that are separate
operations, copies, and the measured error of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commplan.collectives.program import KINDS
from commplan.cost.collective.cost import CollectiveTime
from commplan.cost.schedule.predictor import Predictor
from commplan.ir.ops.base import Work
from commplan.ir.plan import Algorithm
from commplan.ir.remark import Alternative
from commplan.ir.schedule import Collective, Schedule
from commplan.select import options
from commplan.select.options import FEW, MOST_RANKS, NATIVE, CrossedLevel
from commplan.select.size_thresholds import rule
from commplan.topology import Topology

SHOWN = 6  # maximum number of alternatives per decision, not counting the backend's own collective
WRITTEN = "set in the plan"  # the reason of decisions that follow a `via`
TIE_MARGIN = 0.005  # fraction of the fastest time; a simpler candidate that is slower by no more is selected


class Candidate(NamedTuple):
    """An algorithm and message size for a collective, with its predicted time.

    Attributes:
        algorithm: The algorithm.
        chunk: Bytes of a message; None for the default of the backend.
        seconds: The predicted time for the size class of the collective (`size_class`).
        source: The source of the time, in words.
    """

    algorithm: Algorithm
    chunk: int | None
    seconds: float
    source: str


def is_worthwhile(candidate: Candidate, other: Candidate) -> bool:
    """Whether `candidate` is faster than `other` by more than the tie margin."""
    return candidate.seconds < other.seconds * (1 - TIE_MARGIN)


def tie_break(candidates: Sequence[Candidate]) -> Candidate:
    """The first candidate within the tie margin of the fastest.

    There is at least one candidate, and they are in order of simplicity.
    """
    fastest = min(candidate.seconds for candidate in candidates)
    return next(candidate for candidate in candidates if candidate.seconds <= fastest * (1 + TIE_MARGIN))


# Candidates by the properties of the collective (`Chooser._key`). It is shared by the many similar schedules
# of a search, which must have equal axes and costs.
CandidateCache = dict[tuple[object, ...], tuple[Candidate, ...]]


class Decision(NamedTuple):
    """The selected algorithm of a collective.

    Attributes:
        algorithm: The algorithm.
        chunk: Bytes of a message; None for that of the plan or, if it has none, the default of the backend.
        why: The reason, in words; "" if the chooser does not explain its decisions.
        seconds: The predicted time; None without a prediction.
        source: The source of the time, in words; "" without an explanation.
        alternatives: The rejected candidates with the least predicted times, fastest first; empty without an
            explanation.
    """

    algorithm: Algorithm
    chunk: int | None
    why: str
    seconds: float | None = None
    source: str = ""
    alternatives: tuple[Alternative, ...] = ()


class Chooser:
    """Selects algorithms for the collectives of one schedule.

    Args:
        schedule: The schedule.
        costs: Predicts times; None without a topology.
        topology: The topology; None if it is unknown.
        cache: The candidates of schedules with the same axes and costs. The chooser adds to it.
        explains: Whether decisions include reasons and alternatives.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Predictor | None,
        topology: Topology | None,
        cache: CandidateCache,
        *,
        explains: bool = True,
    ) -> None:
        self.schedule, self.costs, self.topology, self.explains = schedule, costs, topology, explains
        self.cache = cache
        self.is_jax = schedule.backend == "jax"

    def decide(self, op: Collective) -> Decision:
        """Select the algorithm and message size of `op`.

        An algorithm, levels or a message size that the plan or an earlier pass has set are kept. Without a
        topology the size decides (`size_thresholds`).
        """
        ranks = self.schedule.size(op.axes)
        if ranks == 1 or op.kind not in KINDS:
            return Decision(op.algorithm, None, "one rank" if ranks == 1 else "only the backend has it")
        if self.costs is None:
            return self._by_rule(op)
        if op.pinned and not op.algorithm.levels:
            return self._decide_pinned(op)
        candidates = self.hierarchies(op) if op.algorithm.levels else self.flat(op)
        alternatives: list[Candidate] = []
        if self.explains:
            alternatives = self.flat(op) if op.algorithm.levels else self.hierarchies(op)
        if not candidates:
            return Decision(op.algorithm, None, "no other candidate has known costs")
        return self._decision(op, tie_break(candidates), [*candidates, *alternatives])

    def estimate(self, op: Collective) -> Candidate | None:
        """A near-optimal candidate for `op`, found with few predictions.

        None without a topology, for one rank, or if no candidate has a prediction.
        """
        if self.costs is None or self.schedule.size(op.axes) == 1:
            return None
        if op.pinned and not op.algorithm.levels:
            return self._candidate(op, op.algorithm, few=True)
        candidates = [] if op.algorithm.levels else self.flat(op, few=True)
        candidates += self.hierarchies(op, few=True)
        return tie_break(candidates) if candidates else None

    def _by_rule(self, op: Collective) -> Decision:
        """The decision without a topology."""
        if op.algorithm.levels:
            levels = options.pinned_levels(op, self.schedule)
            names = options.default_per_level(options.algorithms_per_level(op.kind, levels))
            algorithm = options.hierarchy(levels, names) if names else op.algorithm
            return Decision(algorithm, None, "levels set in the plan")
        if op.pinned:
            return Decision(op.algorithm, None, WRITTEN)
        if self.is_jax:
            return Decision(NATIVE, None, "without a topology the backend's own collective is used")
        if self.schedule.size(op.axes) > MOST_RANKS:
            return Decision(NATIVE, None, f"a program for more than {MOST_RANKS} ranks has too many rounds")
        row = rule(self.schedule.backend, op.kind, self.whole(op))
        return Decision(Algorithm(row.algorithm), row.chunk, "without a topology its size decides")

    def _decide_pinned(self, op: Collective) -> Decision:
        """The decision for an algorithm without levels that the plan specifies."""
        key = self._key(op, op.algorithm)
        if key not in self.cache:
            candidate = self._candidate(op, op.algorithm)
            self.cache[key] = (candidate,) if candidate is not None else ()
        if not self.cache[key]:
            return Decision(op.algorithm, None, WRITTEN)
        (pinned,) = self.cache[key]
        candidates = [*self.flat(op), *self.hierarchies(op)] if self.explains else []
        return self._decision(op, pinned, candidates)._replace(why=WRITTEN)

    def _decision(self, op: Collective, selected: Candidate, candidates: list[Candidate]) -> Decision:
        """The decision for `selected`, with the reason and the runners-up among `candidates`."""
        if not self.explains:
            return Decision(selected.algorithm, selected.chunk, "", selected.seconds)
        runners_up = [candidate for candidate in candidates if candidate.algorithm != selected.algorithm]
        runners_up.sort(key=lambda candidate: candidate.seconds)
        why = "the fastest alone" if runners_up else "the only candidate"
        fastest = min((candidate.seconds for candidate in runners_up), default=selected.seconds)
        if fastest < selected.seconds:
            is_tie = selected.seconds <= fastest * (1 + TIE_MARGIN)
            kind = "with levels" if selected.algorithm.levels else "without levels"
            why = (
                f"within {TIE_MARGIN:.1%} of the fastest alone, and simpler"
                if is_tie
                else f"the fastest {kind}"
            )
        shown = runners_up[:SHOWN] + [
            candidate for candidate in runners_up[SHOWN:] if candidate.algorithm == NATIVE
        ]
        seconds, *other_seconds = (rounded(self._seconds(op, candidate)) for candidate in (selected, *shown))
        alternatives = tuple(
            Alternative(str(candidate.algorithm), s)
            for candidate, s in zip(shown, other_seconds, strict=True)
        )
        return Decision(selected.algorithm, selected.chunk, why, seconds, selected.source, alternatives)

    def flat(self, op: Collective, *, few: bool = False) -> list[Candidate]:
        """The candidates without levels, simplest first. Algorithms that cannot be the fastest are omitted.

        `native` is the simplest. Under MPI it becomes slower than the best program for large messages, so it
        comes last for sizes at which the table of `size_thresholds` does not select it.

        Args:
            op: The collective.
            few: Whether to try only the message sizes of `options.FEW`.
        """
        key = self._key(op, few)
        if key not in self.cache:
            self.cache[key] = tuple(self._flat(op, few=few))
        candidates = [*self.cache[key]]
        native_first = self.is_jax or rule("mpi", op.kind, self.whole(op)).algorithm == "native"
        return (
            candidates
            if native_first
            else sorted(candidates, key=lambda candidate: candidate.algorithm == NATIVE)
        )

    def _key(self, op: Collective, *details: object) -> tuple[object, ...]:
        """Everything that the candidates of `op` depend on."""
        return op.kind, op.axes, size_class(op.nbytes), op.hints.chunk, op.root, *details

    def _flat(self, op: Collective, *, few: bool) -> list[Candidate]:
        """`flat` without the cache, with `native` first."""
        algorithms = options.flat(op.kind, self.schedule.size(op.axes))
        bound_of = {algorithm: self._bound(op, algorithm) for algorithm in algorithms}
        fastest: dict[Algorithm, Candidate] = {}
        for algorithm in sorted(algorithms, key=lambda algorithm: bound_of[algorithm]):
            # Skip algorithms that cannot be the best.
            best = min((candidate.seconds for candidate in fastest.values()), default=math.inf)
            if bound_of[algorithm] <= best * (1 + TIE_MARGIN) or algorithm == NATIVE:
                candidate = self._candidate(op, algorithm, few=True)
                fastest |= {algorithm: candidate} if candidate is not None else {}
        if fastest and not few:  # try all message sizes only for the best
            simplest = tie_break(list(fastest.values()))
            fastest[simplest.algorithm] = self._candidate(op, simplest.algorithm) or simplest
        return [fastest[algorithm] for algorithm in algorithms if algorithm in fastest]

    def whole(self, op: Collective) -> int:
        """Bytes of the whole buffer of `op`."""
        return op.nbytes * (self.schedule.size(op.axes) if op.kind == "all_gather" else 1)

    def hierarchies(self, op: Collective, *, few: bool = False) -> list[Candidate]:
        """The best hierarchy over the levels that `op` crosses, or over those that the plan specifies.

        Args:
            op: The collective.
            few: Whether to try only the default algorithm of each level.

        Returns:
            At most one candidate. Empty if there are fewer than two levels, or no prediction.
        """
        if op.algorithm.levels:
            levels = options.pinned_levels(op, self.schedule)
        else:
            levels = options.crossed_levels(op, self.schedule, self.topology)
        if len(levels) < 2 or op.kind not in KINDS:
            return []
        if (
            self.is_jax
            and op.kind in ("all_reduce", "broadcast")
            and all(level.key in op.axes for level in levels)
        ):
            return self._stepwise(op, levels)
        key = self._key(op, levels, few)
        if key not in self.cache:
            self.cache[key] = tuple(self._greedy(op, levels, few=few))
        return [*self.cache[key]]

    def _greedy(self, op: Collective, levels: tuple[CrossedLevel, ...], *, few: bool) -> list[Candidate]:
        """Start with the default algorithm of each level, and replace them one by one if that is faster.

        Begins at the outermost level. With `few`, the default algorithms are kept.
        """
        choices = options.algorithms_per_level(op.kind, levels)
        if not all(choices):
            return []
        names = list(options.default_per_level(choices))
        if few:
            best = self._candidate(op, options.hierarchy(levels, tuple(names)), few=True)
            return [best] if best is not None else []
        best = None
        for index in reversed(range(len(levels))):
            for name in (names[index], *(n for n in choices[index] if n != names[index])):
                attempt = [*names[:index], name, *names[index + 1 :]]
                candidate = self._candidate(op, options.hierarchy(levels, tuple(attempt)), few=True)
                if candidate is not None and (best is None or is_worthwhile(candidate, best)):
                    best, names = candidate, attempt
        best = self._candidate(op, best.algorithm) if best is not None else None
        return [best] if best is not None else []

    def _stepwise(self, op: Collective, levels: tuple[CrossedLevel, ...]) -> list[Candidate]:
        """The hierarchy with one operation per level, as JAX runs levels that are axes.

        An all-reduce scatters at the inner levels, reduces at the outermost and gathers on the way back. The
        predicted time is the sum of native collectives, also for levels with an algorithm in the plan. Empty
        for an all-reduce other than a sum, which is not split, and without a prediction.
        """
        if op.kind == "all_reduce" and op.op != "sum":
            return []
        nbytes = op.nbytes
        parts: list[Work] = []
        for level in levels[:-1] if op.kind == "all_reduce" else ():
            parts.append(Work("reduce_scatter", "", nbytes, (level.key,)))
            nbytes = -(-nbytes // level.ranks)
            parts.append(Work("all_gather", "", nbytes, (level.key,)))
        for level in levels[-1:] if op.kind == "all_reduce" else levels:
            parts.append(Work(op.kind, "", nbytes, (level.key,)))
        total = self._sequential(parts)
        names = tuple(level.pinned or "native" for level in levels)
        return [Candidate(options.hierarchy(levels, names), None, *total)] if total is not None else []

    def in_wire(self, op: Collective, levels: Sequence[tuple[str, ...]]) -> float | None:
        """Seconds of an all-reduce with wire options, level by level; None without a prediction.

        At all levels but the last, it is a reduce-scatter and an all-gather. If values are added in a wider
        type than they are sent in, all levels are an all-to-all and an all-gather (pass `wire`).

        Args:
            op: The all-reduce.
            levels: The axes of each level, innermost first.
        """
        wire, accumulate = op.hints.wire_types(op.dtype)
        nbytes = op.nbytes * wire.nbytes // op.dtype.nbytes
        parts: list[Work] = []
        for axes in levels:
            shard = -(-nbytes // self.schedule.size(axes))
            if accumulate == wire and axes == levels[-1]:
                parts.append(Work("all_reduce", "", nbytes, axes))
            else:
                scatter = "reduce_scatter" if accumulate == wire else "all_to_all"
                parts += [Work(scatter, "", nbytes, axes), Work("all_gather", "", shard, axes)]
            nbytes = shard
        total = self._sequential(parts)
        return total[0] if total is not None else None

    def _sequential(self, parts: Sequence[Work]) -> tuple[float, str] | None:
        """The seconds of `parts`, one after another, and their source in words.

        None if one of them has no prediction.
        """
        total, source = 0.0, ""
        for part in parts:
            prediction = self._query(part)
            if prediction is None:
                return None
            total, source = total + prediction.seconds, self._source(prediction)
        return total, source

    def _candidate(self, op: Collective, algorithm: Algorithm, *, few: bool = False) -> Candidate | None:
        """The candidate for `algorithm` with the best of several message sizes; None without a prediction.

        The message size of the plan is kept. With `few`, only the sizes of `options.FEW` are tried.
        """
        sizes: list[int | None] = [None]
        op = replace(op, nbytes=size_class(op.nbytes))
        if op.hints.chunk is not None and algorithm != NATIVE:
            sizes = [op.hints.chunk]
        elif algorithm != NATIVE and not self.is_jax:
            # Under JAX, slices run one after another in the form `rounds`, which saves nothing.
            pieces = options.pieces(self.whole(op))
            sizes += [size for size in pieces if not few or size in FEW]
        candidates: list[Candidate] = []
        for size in sizes:
            prediction = self._query(self._work(op, algorithm, size))
            if prediction is not None:
                candidates.append(Candidate(algorithm, size, prediction.seconds, self._source(prediction)))
        return tie_break(candidates) if candidates else None

    def _work(self, op: Collective, algorithm: Algorithm, chunk: int | None) -> Work:
        form = "rounds" if self.is_jax else "call"
        return Work(op.kind, "", op.nbytes, op.axes, algorithm, chunk, op.root or 0, form)

    def _bound(self, op: Collective, algorithm: Algorithm) -> float:
        """A lower bound on the seconds of `algorithm`."""
        work = self._work(replace(op, nbytes=size_class(op.nbytes)), algorithm, None)
        return self.costs.least_seconds(work) if self.costs is not None else 0.0

    def _seconds(self, op: Collective, candidate: Candidate) -> float:
        """The predicted time for the exact size of `op`; `candidate.seconds` is for its size class.

        Hierarchies of JAX with one operation per level keep the time of the size class.
        """
        if (
            self.is_jax
            and candidate.algorithm.levels
            and all(key in op.axes for key, _ in candidate.algorithm.levels)
        ):
            return candidate.seconds
        prediction = self._query(self._work(op, candidate.algorithm, candidate.chunk))
        return prediction.seconds if prediction is not None else candidate.seconds

    def _source(self, time: CollectiveTime) -> str:
        return self.costs.in_words(time.source) if self.costs is not None else time.source

    def _query(self, work: Work) -> CollectiveTime | None:
        return self.costs.query(work) if self.costs is not None else None


def size_class(nbytes: int) -> int:
    """`nbytes` rounded to one of two sizes per factor of two, at least 1. Equal classes share a decision."""
    return max(1, round(2 ** (round(2 * math.log2(max(1, nbytes))) / 2)))


def rounded(seconds: float) -> float:
    """Round to four significant digits: schedules must not depend on rounding errors of the machine."""
    return float(f"{seconds:.3e}")
