"""The search that `bucket`, `decompose` and `select` share: what carries out a collective fastest.

Every candidate has a predicted time (`costs`); the fastest is taken, and of those within `TIE` of it the
simplest, so that small errors of the model decide nothing. Under JAX a chunk program is many operations where
the backend has one: it is a candidate only where the machine was measured, and must win by `CLEARLY`. A
hierarchy in levels of the backend's own must win by `EVENLY`.
"""

from __future__ import annotations

from typing import NamedTuple

from commplan.ir.choice import Alternative
from commplan.ir.plan import Algorithm
from commplan.ir.schedule import Collective
from commplan.passes import candidates
from commplan.passes.candidates import MOST_RANKS, NATIVE
from commplan.passes.rules import rule
from commplan.passes.ways import CLEARLY, TIE, Way, Ways

SHOWN = 6  # alternatives that a schedule keeps of one decision, the fastest; and the backend's own


class Decision(NamedTuple):
    """What is taken, why, and what else there was, fastest first. No `seconds`: nothing tells times."""

    algorithm: Algorithm
    chunk: int | None
    why: str
    seconds: float | None = None
    source: str = ""
    alternatives: tuple[Alternative, ...] = ()


class Chooser(Ways):
    """Chooses for the collectives of one schedule."""

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

    def about(self, op: Collective) -> Way | None:
        """`op` carried out about as well as can be; None where nothing tells times."""
        if self.costs is None or self.schedule.size(op.axes) == 1:
            return None
        if op.pinned and not op.algorithm.levels:
            ways = self.messages(op, op.algorithm, few=True)
        else:
            ways = [] if op.algorithm.levels else self.flat(op, few=True)
            ways += self.hierarchies(op, few=True)
        return self.fastest(ways) if ways else None

    def _by_rule(self, op: Collective) -> Decision:
        if op.algorithm.levels:
            ladder = candidates.pinned_rungs(op, self.schedule)
            names = candidates.usual(candidates.menus(op.kind, ladder))
            algorithm = candidates.hierarchy(ladder, names) if names else op.algorithm
            return Decision(algorithm, None, "the plan writes these levels")
        if op.pinned:
            return Decision(op.algorithm, None, "the plan writes it so")
        if self.jax:
            return Decision(NATIVE, None, "without a topology the backend's own is taken")
        if self.schedule.size(op.axes) > MOST_RANKS:
            return Decision(NATIVE, None, f"a program for more than {MOST_RANKS} ranks has too many rounds")
        row = rule(self.schedule.backend, op.kind, self.whole(op))
        return Decision(Algorithm(row.algorithm), row.chunk, "without a topology its size decides")

    def _pinned(self, op: Collective) -> Decision:
        ways = self.messages(op, op.algorithm)
        if not ways:
            return Decision(op.algorithm, None, "the plan writes it so")
        others = [*self.flat(op), *self.hierarchies(op)]
        made = self._decision(op, ways[0], others)
        return made._replace(why="the plan writes it so")

    def _decision(self, op: Collective, taken: Way, ways: list[Way]) -> Decision:
        rest = sorted((w for w in ways if w.algorithm != taken.algorithm), key=lambda way: way.seconds)
        faster = any(way.seconds < taken.seconds for way in rest)
        why = "the fastest" if rest else "the backend's own: programs are tried where a calibration is given"
        if faster:
            why = self._why_slower(taken, rest)
        shown = rest[:SHOWN] + [way for way in rest[SHOWN:] if way.algorithm == NATIVE]
        others = tuple(Alternative(str(way.algorithm), rounded(way.seconds)) for way in shown)
        return Decision(
            taken.algorithm, taken.chunk, why, rounded(taken.seconds), taken.source, others
        )  # fmt: skip

    def _why_slower(self, taken: Way, rest: list[Way]) -> str:
        least = min(way.seconds for way in rest)
        if taken.seconds <= least * (1 + TIE):
            return f"within {TIE:.0%} of the fastest, and simpler"
        if taken.is_measured:
            return f"the fastest of what was measured: a guess must save {CLEARLY:.0%}"
        return "under JAX many operations must save much more than one"


def rounded(seconds: float) -> float:
    """To four digits: no machine's last bit gets into a schedule."""
    return float(f"{seconds:.3e}")
