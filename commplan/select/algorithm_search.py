"""The search that `bucket`, `decompose` and `select` share: what carries out a collective fastest.

Every candidate has a predicted time (`costs`); the fastest is taken, and of those within `TIE_MARGIN` of it
the simplest. What a way costs that the links do not show (rounds that are operations of their own, copies,
what measured ways take beyond their model) is part of its predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commplan.collectives.program import KINDS
from commplan.cost.collective.cost import CollectiveTime
from commplan.cost.predictor import Predictor
from commplan.ir.ops.base import Work
from commplan.ir.plan import Algorithm
from commplan.ir.remark import Alternative
from commplan.ir.schedule import Collective, Schedule
from commplan.select import options
from commplan.select.options import FEW, MOST_RANKS, NATIVE, HierarchyLevel
from commplan.select.size_thresholds import rule
from commplan.topology import Topology

SHOWN = 6  # alternatives that a schedule keeps of one decision, the fastest; and the backend's own
WRITTEN = "the plan writes it so"
TIE_MARGIN = 0.005  # a simpler way that is slower by no more is taken


class Candidate(NamedTuple):
    """One way to carry out a collective, and its predicted time in seconds."""

    algorithm: Algorithm
    chunk: int | None
    seconds: float
    source: str


def is_worthwhile(way: Candidate, than: Candidate) -> bool:
    """Whether `way` is so much faster that it is worth taking."""
    return way.seconds < than.seconds * (1 - TIE_MARGIN)


def tie_break(ways: Sequence[Candidate]) -> Candidate:
    """The first of the fastest: they stand in order of simplicity."""
    least = min(way.seconds for way in ways)
    return next(way for way in ways if way.seconds <= least * (1 + TIE_MARGIN))


class Decision(NamedTuple):
    """What is taken, why, and what else there was, fastest first. No `seconds`: nothing tells times."""

    algorithm: Algorithm
    chunk: int | None
    why: str
    seconds: float | None = None
    source: str = ""
    alternatives: tuple[Alternative, ...] = ()


class Chooser:
    """Chooses for the collectives of one schedule."""

    def __init__(
        self, schedule: Schedule, costs: Predictor | None, topology: Topology | None, *, explains: bool = True
    ) -> None:
        """explains: whether decisions are to say what else there was."""
        self.schedule, self.costs, self.topology, self.explains = schedule, costs, topology, explains
        self.jax = schedule.backend == "jax"

    def decide(self, op: Collective) -> Decision:
        """The algorithm and the messages of `op`, where the plan and earlier passes leave them open."""
        ranks = self.schedule.size(op.axes)
        if ranks == 1 or op.kind not in KINDS:
            return Decision(op.algorithm, None, "one rank" if ranks == 1 else "only the backend has it")
        if self.costs is None:
            return self._by_rule(op)
        if op.pinned and not op.algorithm.levels:
            return self._pinned(op)
        ways = self.hierarchies(op) if op.algorithm.levels else self.flat(op)
        others: list[Candidate] = []
        if self.explains:
            others = self.flat(op) if op.algorithm.levels else self.hierarchies(op)
        if not ways:
            return Decision(op.algorithm, None, "nothing is known of other ways")
        return self._decision(op, tie_break(ways), [*ways, *others])

    def about(self, op: Collective) -> Candidate | None:
        """`op` carried out about as well as can be; None where nothing tells times."""
        if self.costs is None or self.schedule.size(op.axes) == 1:
            return None
        if op.pinned and not op.algorithm.levels:
            return self._way(op, op.algorithm, few=True)
        ways = [] if op.algorithm.levels else self.flat(op, few=True)
        ways += self.hierarchies(op, few=True)
        return tie_break(ways) if ways else None

    def _by_rule(self, op: Collective) -> Decision:
        if op.algorithm.levels:
            ladder = options.pinned_levels(op, self.schedule)
            names = options.default_per_level(options.menus(op.kind, ladder))
            algorithm = options.hierarchy(ladder, names) if names else op.algorithm
            return Decision(algorithm, None, "the plan writes these levels")
        if op.pinned:
            return Decision(op.algorithm, None, WRITTEN)
        if self.jax:
            return Decision(NATIVE, None, "without a topology the backend's own is taken")
        if self.schedule.size(op.axes) > MOST_RANKS:
            return Decision(NATIVE, None, f"a program for more than {MOST_RANKS} ranks has too many rounds")
        row = rule(self.schedule.backend, op.kind, self.whole(op))
        return Decision(Algorithm(row.algorithm), row.chunk, "without a topology its size decides")

    def _pinned(self, op: Collective) -> Decision:
        way = self._way(op, op.algorithm)
        if way is None:
            return Decision(op.algorithm, None, WRITTEN)
        ways = [*self.flat(op), *self.hierarchies(op)] if self.explains else []
        return self._decision(op, way, ways)._replace(why=WRITTEN)

    def _decision(self, op: Collective, taken: Candidate, ways: list[Candidate]) -> Decision:
        if not self.explains:
            return Decision(taken.algorithm, taken.chunk, "", taken.seconds)
        rest = sorted((w for w in ways if w.algorithm != taken.algorithm), key=lambda way: way.seconds)
        why = "the fastest alone" if rest else "there is no other way"
        least = min((way.seconds for way in rest), default=taken.seconds)
        if least < taken.seconds:
            near = taken.seconds <= least * (1 + TIE_MARGIN)
            kind = "with levels" if taken.algorithm.levels else "without levels"
            why = (
                f"within {TIE_MARGIN:.1%} of the fastest alone, and simpler"
                if near
                else f"the fastest {kind}"
            )
        shown = rest[:SHOWN] + [way for way in rest[SHOWN:] if way.algorithm == NATIVE]
        seconds, *others = (rounded(self._exactly(op, way)) for way in (taken, *shown))
        alternatives = tuple(Alternative(str(way.algorithm), s) for way, s in zip(shown, others, strict=True))
        return Decision(taken.algorithm, taken.chunk, why, seconds, taken.source, alternatives)

    def flat(self, op: Collective, *, few: bool = False) -> list[Candidate]:
        """The ways that know of no levels, simplest first.

        That is `native`; but an MPI library's own gets slower than its best algorithm as messages grow, so
        where the table of `rules` leaves it behind it comes last.
        """
        algorithms = options.flat(op.kind, self.schedule.size(op.axes))
        least = {algorithm: self._least(op, algorithm) for algorithm in algorithms}
        fastest: dict[Algorithm, Candidate] = {}
        for algorithm in sorted(
            algorithms, key=lambda each: least[each]
        ):  # what cannot be the best is skipped
            best = min((way.seconds for way in fastest.values()), default=math.inf)
            if least[algorithm] <= best * (1 + TIE_MARGIN) or algorithm == NATIVE:
                way = self._way(op, algorithm, few=True)
                fastest |= {algorithm: way} if way is not None else {}
        if fastest and not few:  # all sizes of messages for the best alone
            best_way = tie_break(list(fastest.values()))
            fastest[best_way.algorithm] = self._way(op, best_way.algorithm) or best_way
        ways = [fastest[algorithm] for algorithm in algorithms if algorithm in fastest]
        small = self.jax or rule("mpi", op.kind, self.whole(op)).algorithm == "native"
        return ways if small else sorted(ways, key=lambda way: way.algorithm == NATIVE)

    def whole(self, op: Collective) -> int:
        """Bytes of the buffer that all ranks of `op` together make."""
        return op.nbytes * (self.schedule.size(op.axes) if op.kind == "all_gather" else 1)

    def hierarchies(self, op: Collective, *, few: bool = False) -> list[Candidate]:
        """The best hierarchies over the levels that `op` crosses, or over those that are written."""
        if op.algorithm.levels:
            ladder = options.pinned_levels(op, self.schedule)
        else:
            ladder = options.crossed_levels(op, self.schedule, self.topology)
        if len(ladder) < 2 or op.kind not in KINDS:
            return []
        if self.jax and op.kind in ("all_reduce", "broadcast") and all(r.key in op.axes for r in ladder):
            return self._stepwise(op, ladder)
        return self._greedy(op, ladder, few=few)

    def _greedy(self, op: Collective, ladder: tuple[HierarchyLevel, ...], *, few: bool) -> list[Candidate]:
        """Begin with one algorithm everywhere, then change level by level what makes it faster."""
        menus = options.menus(op.kind, ladder)
        if not all(menus):
            return []
        names = list(options.default_per_level(menus))
        if few:
            best = self._way(op, options.hierarchy(ladder, tuple(names)), few=True)
            return [best] if best is not None else []
        best = None
        for index in reversed(range(len(ladder))):
            for name in (names[index], *(n for n in menus[index] if n != names[index])):
                tried = [*names[:index], name, *names[index + 1 :]]
                way = self._way(op, options.hierarchy(ladder, tuple(tried)), few=True)
                if way is not None and (best is None or is_worthwhile(way, best)):
                    best, names = way, tried
        best = self._way(op, best.algorithm) if best is not None else None
        return [best] if best is not None else []

    def _stepwise(self, op: Collective, ladder: tuple[HierarchyLevel, ...]) -> list[Candidate]:
        """One collective of the backend's own for each level: the sum of their times."""
        if op.kind == "all_reduce" and op.op != "sum":
            return []
        nbytes = op.nbytes
        parts: list[Work] = []
        for rung in ladder[:-1] if op.kind == "all_reduce" else ():
            parts.append(Work("reduce_scatter", "", nbytes, (rung.key,)))
            nbytes = -(-nbytes // rung.ranks)
            parts.append(Work("all_gather", "", nbytes, (rung.key,)))
        for rung in ladder[-1:] if op.kind == "all_reduce" else ladder:
            parts.append(Work(op.kind, "", nbytes, (rung.key,)))
        total = self._in_turn(parts)
        names = tuple(rung.pinned or "native" for rung in ladder)
        return [Candidate(options.hierarchy(ladder, names), None, *total)] if total is not None else []

    def in_wire(self, op: Collective, levels: Sequence[tuple[str, ...]]) -> float | None:
        """Seconds of the all-reduce `op` over the axes of each level, innermost first, in its wire type.

        What is added in a wider type than it travels in is an all-to-all and an all-gather (the pass `wire`).
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
        total = self._in_turn(parts)
        return total[0] if total is not None else None

    def _in_turn(self, parts: Sequence[Work]) -> tuple[float, str] | None:
        """The seconds of `parts`, one after another; None where one of them is not known."""
        total, source = 0.0, ""
        for part in parts:
            prediction = self._ask(part)
            if prediction is None:
                return None
            total, source = total + prediction.seconds, self._source(prediction)
        return total, source

    def _way(self, op: Collective, algorithm: Algorithm, *, few: bool = False) -> Candidate | None:
        """`algorithm` whole, or cut into messages of the best of several sizes."""
        sizes: list[int | None] = [None]
        op = replace(op, nbytes=size_class(op.nbytes))
        if op.hints.chunk is not None and algorithm != NATIVE:
            sizes = [op.hints.chunk]
        elif algorithm != NATIVE and not self.jax:  # in rounds slices follow one another: nothing is saved
            pieces = options.pieces(self.whole(op))
            sizes += [size for size in pieces if not few or size in FEW]
        ways: list[Candidate] = []
        for size in sizes:
            prediction = self._ask(self._work(op, algorithm, size))
            if prediction is not None:
                ways.append(Candidate(algorithm, size, prediction.seconds, self._source(prediction)))
        return tie_break(ways) if ways else None

    def _work(self, op: Collective, algorithm: Algorithm, chunk: int | None) -> Work:
        form = "rounds" if self.jax else "call"
        return Work(op.kind, "", op.nbytes, op.axes, algorithm, chunk, op.root or 0, form)

    def _least(self, op: Collective, algorithm: Algorithm) -> float:
        """Seconds that `algorithm` takes at least."""
        work = self._work(replace(op, nbytes=size_class(op.nbytes)), algorithm, None)
        return self.costs.least_seconds(work) if self.costs is not None else 0.0

    def _exactly(self, op: Collective, way: Candidate) -> float:
        """The predicted time of `way` for `op`, whose own is that of its class of sizes."""
        if self.jax and way.algorithm.levels and all(key in op.axes for key, _ in way.algorithm.levels):
            return way.seconds
        prediction = self._ask(self._work(op, way.algorithm, way.chunk))
        return prediction.seconds if prediction is not None else way.seconds

    def _source(self, time: CollectiveTime) -> str:
        return self.costs.in_words(time.source) if self.costs is not None else time.source

    def _ask(self, work: Work) -> CollectiveTime | None:
        return self.costs.query(work) if self.costs is not None else None


def size_class(nbytes: int) -> int:
    """A size near `nbytes`, two for each doubling: what is fastest there is taken for all near it."""
    return max(1, round(2 ** (round(2 * math.log2(max(1, nbytes))) / 2)))


def rounded(seconds: float) -> float:
    """To four digits: no machine's last bit gets into a schedule."""
    return float(f"{seconds:.3e}")
