"""The search that `bucket`, `decompose` and `select` share: what carries out a collective fastest.

Every candidate has a predicted time (`costs`); the fastest is taken, and of those within `TIE` of it the
simplest, so that small errors of the model decide nothing. Under JAX a chunk program is many operations where
the backend has one: it is a candidate only where the machine was measured, and must win by `CLEARLY`. A
hierarchy in levels of the backend's own must win by `EVENLY`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Alternative, Collective, CollectiveKind, Schedule
from commplan.passes import candidates
from commplan.passes.base import Context
from commplan.passes.candidates import MOST_RANKS, NATIVE, PIECES, Rung
from commplan.passes.costs import Ask, Prediction
from commplan.passes.rules import PIECE, rule

TIE = 0.02  # a simpler way that is slower by no more is taken
EVENLY = 0.05  # a hierarchy of collectives of the backend's own, under JAX, must save so much
CLEARLY = 0.20  # a chunk program, under JAX, must save so much


SHOWN = 6  # alternatives that a schedule keeps of one decision


class Way(NamedTuple):
    """One way to carry out a collective, and its predicted time in seconds."""

    algorithm: Algorithm
    chunk: int | None
    seconds: float
    source: str

    def __str__(self) -> str:
        return named(self.algorithm)


class Decision(NamedTuple):
    """What is taken, why, and what else there was, fastest first. No `seconds`: nothing tells times."""

    algorithm: Algorithm
    chunk: int | None
    why: str
    seconds: float | None = None
    source: str = ""
    alternatives: tuple[Alternative, ...] = ()


def named(algorithm: Algorithm) -> str:
    return str(algorithm)


class Chooser:
    """Chooses for the collectives of one schedule."""

    def __init__(self, schedule: Schedule, context: Context) -> None:
        self.schedule, self.context = schedule, context
        self.costs = context.costs
        self.jax = schedule.backend == "jax"

    def decide(self, op: Collective) -> Decision:
        """The algorithm and the messages of `op`, where the plan and earlier passes leave them open."""
        ranks = self.schedule.size(op.axes)
        if ranks == 1 or op.kind == "all_to_all":
            return Decision(op.algorithm, None, "one rank" if ranks == 1 else "only the backend has it")
        if self.costs is None:
            return self._by_rule(op)
        if op.pinned and not op.algorithm.levels:
            return self._pinned(op)
        ways = self.hierarchies(op) if op.algorithm.levels else self.flat(op)
        others = self.flat(op) if op.algorithm.levels else self.hierarchies(op)
        if not ways:
            return Decision(op.algorithm, None, "nothing is known of other ways")
        taken = self.fastest(ways)
        return self._decision(op, taken, [*ways, *others])

    def time(self, op: Collective) -> float | None:
        """The predicted seconds of `op`, carried out about as well as can be; None where nothing tells."""
        if self.costs is None or self.schedule.size(op.axes) == 1:
            return None
        if op.pinned and not op.algorithm.levels:
            ways = self._messages(op, op.algorithm, few=True)
        else:
            ways = [] if op.algorithm.levels else self.flat(op, few=True)
            ways += self.hierarchies(op, few=True)
        return self.fastest(ways).seconds if ways else None

    def fastest(self, ways: Iterable[Way]) -> Way:
        """The first of `ways` that is within `TIE` of the fastest: they stand in order of simplicity.

        Under JAX a program must be faster than the backend's own by `CLEARLY`.
        """
        known = list(ways)
        if self.jax:
            native = next((way.seconds for way in known if way.algorithm == NATIVE), None)
            limit = (1 - CLEARLY) * native if native is not None else None
            known = [
                way for way in known
                if limit is None or way.algorithm == NATIVE or _is_native(way) or way.seconds < limit
            ]  # fmt: skip
        least = min(way.seconds for way in known)
        return next(way for way in known if way.seconds <= least * (1 + TIE))

    def flat(self, op: Collective, *, few: bool = False) -> list[Way]:
        """The ways that know of no levels, simplest first.

        That is `native`; but an MPI library's own gets slower than its best algorithm as messages grow, so
        where the table of `rules` leaves it behind it comes last.
        """
        programs = not self.jax or (self.costs is not None and self.costs.measured)
        ranks = self.schedule.size(op.axes)
        found: list[Way] = []
        for algorithm in candidates.flat(op.kind, ranks, programs=programs):
            found += self._messages(op, algorithm, few=few)
        small = self.jax or rule("mpi", op.kind, self.whole(op)).algorithm == "native"
        return found if small else [*found[1:], *found[:1]]

    def whole(self, op: Collective) -> int:
        """Bytes of the buffer that all ranks of `op` together make."""
        return op.nbytes * (self.schedule.size(op.axes) if op.kind == "all_gather" else 1)

    def hierarchies(self, op: Collective, *, few: bool = False) -> list[Way]:
        """The best hierarchies over the levels that `op` crosses, or over those that are written."""
        if op.algorithm.levels:
            ladder = candidates.pinned_rungs(op, self.schedule)
        else:
            ladder = candidates.rungs(op, self.schedule, self.context.topology)
        if len(ladder) < 2:
            return []
        if self.jax and op.kind in ("all_reduce", "broadcast") and all(r.key in op.axes for r in ladder):
            return self._stepwise(op, ladder)
        if self.jax and (self.costs is None or not self.costs.measured):
            return []
        return self._greedy(op, ladder, few=few)

    def _greedy(self, op: Collective, ladder: tuple[Rung, ...], *, few: bool) -> list[Way]:
        """Begin with one algorithm everywhere, then change level by level what makes it faster."""
        menus = candidates.menus(op.kind, ladder)
        if not all(menus):
            return []
        names = ["ring" if "ring" in menu else menu[0] for menu in menus]
        if few:
            return self._messages(op, candidates.hierarchy(ladder, tuple(names)), few=True)
        best: Way | None = None
        for index in reversed(range(len(ladder))):
            for name in (names[index], *(n for n in menus[index] if n != names[index])):
                tried = [*names[:index], name, *names[index + 1 :]]
                ways = self._messages(op, candidates.hierarchy(ladder, tuple(tried)), few=True)
                way = self.fastest(ways) if ways else None
                if way is not None and (best is None or way.seconds < best.seconds * (1 - TIE)):
                    best, names = way, tried
        return self._messages(op, best.algorithm) if best is not None else []

    def _stepwise(self, op: Collective, ladder: tuple[Rung, ...]) -> list[Way]:
        """One collective of the backend's own for each level: the sum of their times."""
        if op.kind == "all_reduce" and op.op != "sum":
            return []
        total, source, nbytes = 0.0, "", op.nbytes
        parts: list[tuple[CollectiveKind, str, int]] = []
        for rung in ladder[:-1] if op.kind == "all_reduce" else ():
            parts.append(("reduce_scatter", rung.key, nbytes))
            nbytes = -(-nbytes // rung.ranks)
            parts.append(("all_gather", rung.key, nbytes))
        for rung in ladder[-1:] if op.kind == "all_reduce" else ladder:
            parts.append((op.kind, rung.key, nbytes))
        for kind, axis, size in parts:
            told = self._ask(Ask(kind, NATIVE, (axis,), size))
            if told is None:
                return []
            total, source = total + told.seconds, told.source
        names = tuple(rung.pinned or "native" for rung in ladder)
        return [Way(candidates.hierarchy(ladder, names), None, total, source)]

    def _messages(self, op: Collective, algorithm: Algorithm, *, few: bool = False) -> list[Way]:
        """`algorithm` whole, and cut into messages of several sizes."""
        sizes: list[int | None] = [None]
        if op.hints.chunk is not None and algorithm != NATIVE:
            sizes = [op.hints.chunk]
        elif algorithm != NATIVE:
            whole = self.whole(op)
            pieces = PIECES[1::3] if few else PIECES
            sizes += [size for size in pieces if whole // 1024 < size < whole]
        found: list[Way] = []
        form = "rounds" if self.jax else "call"
        for size in sizes:
            told = self._ask(Ask(op.kind, algorithm, op.axes, op.nbytes, size, op.root or 0, form))
            if told is not None:
                found.append(Way(algorithm, size, told.seconds, told.source))
        return [self._simplest(found)] if found else []

    def _simplest(self, ways: list[Way]) -> Way:
        least = min(way.seconds for way in ways)
        return next(way for way in ways if way.seconds <= least * (1 + TIE))

    def _ask(self, ask: Ask) -> Prediction | None:
        return self.costs.predict(ask) if self.costs is not None else None

    def _by_rule(self, op: Collective) -> Decision:
        if op.algorithm.levels:
            ladder = candidates.pinned_rungs(op, self.schedule)
            menus = candidates.menus(op.kind, ladder)
            names = tuple("ring" if "ring" in menu else menu[0] for menu in menus)
            return Decision(candidates.hierarchy(ladder, names), PIECE, "the plan writes these levels")
        if op.pinned:
            return Decision(op.algorithm, None, "the plan writes it so")
        if self.jax:
            return Decision(NATIVE, None, "without a topology the backend's own is taken")
        if self.schedule.size(op.axes) > MOST_RANKS:
            return Decision(NATIVE, None, f"a program for more than {MOST_RANKS} ranks has too many rounds")
        row = rule(self.schedule.backend, op.kind, self.whole(op))
        return Decision(Algorithm(row.algorithm), row.chunk, "without a topology its size decides")

    def _pinned(self, op: Collective) -> Decision:
        ways = self._messages(op, op.algorithm)
        if not ways:
            return Decision(op.algorithm, None, "the plan writes it so")
        others = [*self.flat(op), *self.hierarchies(op)]
        made = self._decision(op, ways[0], others)
        return made._replace(why="the plan writes it so")

    def _decision(self, op: Collective, taken: Way, ways: list[Way]) -> Decision:
        rest = sorted((w for w in ways if w.algorithm != taken.algorithm), key=lambda way: way.seconds)
        faster = any(way.seconds < taken.seconds for way in rest)
        why = "the fastest" if not faster else self._why_slower(taken, rest)
        others = tuple(Alternative(str(way), rounded(way.seconds)) for way in rest[:SHOWN])
        return Decision(
            taken.algorithm, taken.chunk, why, rounded(taken.seconds), taken.source, others
        )  # fmt: skip

    def _why_slower(self, taken: Way, rest: list[Way]) -> str:
        least = min(way.seconds for way in rest)
        if taken.seconds <= least * (1 + TIE):
            return f"within {TIE:.0%} of the fastest, and simpler"
        return "under JAX many operations must save much more than one"


def _is_native(way: Way) -> bool:
    return bool(way.algorithm.levels) and all(how == NATIVE for _, how in way.algorithm.levels)


def rounded(seconds: float) -> float:
    """To four digits: no machine's last bit gets into a schedule."""
    return float(f"{seconds:.3e}")
