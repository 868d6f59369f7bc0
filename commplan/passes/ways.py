"""The ways in which a collective might be carried out, each with its predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Collective, CollectiveKind, Schedule
from commplan.passes import candidates
from commplan.passes.base import Context
from commplan.passes.candidates import NATIVE, PIECES, Rung
from commplan.passes.costs import Ask, Prediction
from commplan.passes.rules import rule

TIE = 0.04  # a simpler way that is slower by no more is taken: calibrations do not repeat to less
EVENLY = 0.05  # a hierarchy of collectives of the backend's own, under JAX, must save so much
CLEARLY = 0.20  # a chunk program, under JAX, must save so much; so must a guess, beside what was measured


class Way(NamedTuple):
    """One way to carry out a collective, and its predicted time in seconds."""

    algorithm: Algorithm
    chunk: int | None
    seconds: float
    source: str

    @property
    def is_native(self) -> bool:
        """Whether it is made of the backend's own collectives alone."""
        levels = self.algorithm.levels
        return self.algorithm == NATIVE or (bool(levels) and all(how == NATIVE for _, how in levels))

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")


def saves(way: Way, than: Way) -> bool:
    """Whether `way` is so much faster that it is worth taking."""
    needed = CLEARLY if than.is_measured and not way.is_measured else TIE
    return way.seconds < than.seconds * (1 - needed)


def simplest(ways: Sequence[Way]) -> Way:
    """The first of the fastest. Beside a way that was measured, what the model leaves out of another would
    look like a gain: that one must save `CLEARLY`."""
    measured = [way.seconds for way in ways if way.is_measured]
    limit = (1 - CLEARLY) * min(measured) if measured else float("inf")
    known = [way for way in ways if way.is_measured or way.seconds < limit]
    least = min(way.seconds for way in known)
    return next(way for way in known if way.seconds <= least * (1 + TIE))


class Ways:
    """Finds ways for the collectives of one schedule."""

    def __init__(self, schedule: Schedule, context: Context) -> None:
        self.schedule, self.context = schedule, context
        self.costs = context.costs
        self.jax = schedule.backend == "jax"

    def fastest(self, ways: Iterable[Way]) -> Way:
        """The `simplest` of `ways`: they stand in order of simplicity.

        Under JAX a program must be faster than the backend's own by `CLEARLY`.
        """
        known = list(ways)
        if self.jax:
            native = next((way.seconds for way in known if way.algorithm == NATIVE), None)
            limit = (1 - CLEARLY) * native if native is not None else None
            known = [
                way for way in known
                if limit is None or way.is_native or way.seconds < limit
            ]  # fmt: skip
        return simplest(known)

    def flat(self, op: Collective, *, few: bool = False) -> list[Way]:
        """The ways that know of no levels, simplest first.

        That is `native`; but an MPI library's own gets slower than its best algorithm as messages grow, so
        where the table of `rules` leaves it behind it comes last.
        """
        programs = not self.jax or (self.costs is not None and self.costs.measured)
        ranks = self.schedule.size(op.axes)
        found: list[Way] = []
        for algorithm in candidates.flat(op.kind, ranks, programs=programs):
            found += self.messages(op, algorithm, few=few)
        small = self.jax or rule("mpi", op.kind, self.whole(op)).algorithm == "native"
        return found if small else sorted(found, key=lambda way: way.algorithm == NATIVE)

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
        names = list(candidates.usual(menus))
        if few:
            return self.messages(op, candidates.hierarchy(ladder, tuple(names)), few=True)
        best: Way | None = None
        for index in reversed(range(len(ladder))):
            for name in (names[index], *(n for n in menus[index] if n != names[index])):
                tried = [*names[:index], name, *names[index + 1 :]]
                ways = self.messages(op, candidates.hierarchy(ladder, tuple(tried)), few=True)
                way = self.fastest(ways) if ways else None
                if way is not None and (best is None or saves(way, best)):
                    best, names = way, tried
        return self.messages(op, best.algorithm) if best is not None else []

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

    def messages(self, op: Collective, algorithm: Algorithm, *, few: bool = False) -> list[Way]:
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
        return [simplest(found)] if found else []

    def _ask(self, ask: Ask) -> Prediction | None:
        return self.costs.predict(ask) if self.costs is not None else None
