"""Prove hierarchical programs from the programs of their levels.

A rank has a coordinate at every level and a chunk has a part at every level. Between two stages, the state of
each level records which ranks hold a chunk (`Holders`) and whether the contributions of all coordinates are
summed. A rank holds a chunk if it is a holder at all levels. A stage runs one collective within all groups of
a level. Members of a group differ at that level only, so they hold the same parts of all other levels, and
the proved postcondition changes the state of that level only. All ranks execute stages in the same order and
both ends of a message are in one round of one stage, so a sequence of deadlock-free stages is deadlock-free.

If a broadcast uses shards, `hierarchical` omits data that its receivers already hold, and it builds a reduce
by reversing such a broadcast. Omitting copies of identical data changes no slot; and since every slot is
written once, the reversed paths carry every contribution once. Tests also prove both directly.

Sums remain bitwise equal: ranks that differ in a summed coordinate and hold the same chunk have either copied
it or added equal values with one program in one order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from commplan.collectives.hierarchical import Levels, LevelStage, places_of
from commplan.collectives.postcondition import HOLDERS, Holders
from commplan.collectives.program import Kind
from commplan.ir.collective_kinds import REDUCING, ROOTED
from commplan.verify.programs.counterexample import Counterexample


class LevelState(NamedTuple):
    """The state of one level.

    Attributes:
        holds: the ranks of the level that hold a chunk.
        summed: whether the contributions of all coordinates of the level are summed.
    """

    holds: Holders
    summed: bool

    def __str__(self) -> str:
        return f"{self.holds.value}{', summed' if self.summed else ''}"


class LevelProgram(NamedTuple):
    """The program of one level, which is proved unless it is native.

    Attributes:
        algorithm: name of the algorithm, or `native`.
        kind: the collective.
        ranks: number of ranks of the level.
        root: rank of the root in the level; 0 for collectives without a root.
    """

    algorithm: str
    kind: Kind
    ranks: int
    root: int


def task_of(levels: Levels, stage: LevelStage) -> LevelProgram:
    """Return the program of a stage. The root is nonzero only for rooted collectives."""
    return LevelProgram(stage.algorithm, stage.kind, levels[stage.level][1], stage.own_root)


def compose(levels: Levels, kind: Kind, stages: Sequence[LevelStage], root: int = 0) -> Counterexample | None:
    """Check that stages implement `kind` over all ranks, given that each stage is correct.

    Args:
        levels: algorithm and number of ranks of each level, innermost first.
        kind: the collective.
        stages: the stages in order.
        root: rank of the root, with the innermost level fastest.

    Returns:
        A counterexample, or None if the stages are correct.
    """
    before, after = HOLDERS[kind]
    places = places_of(levels, root)  # the root's coordinate at each level
    states = [LevelState(before, False) for _ in levels]
    for number, stage in enumerate(stages):
        wrong = _step(levels, places, states, number, stage)
        if wrong is not None:
            return wrong
        summed = states[stage.level].summed or stage.kind in REDUCING
        states[stage.level] = LevelState(HOLDERS[stage.kind][1], summed)
    goal = LevelState(after, kind in REDUCING)
    for level, (_, ranks) in enumerate(levels):
        if ranks > 1 and states[level] != goal:
            return _wrong(f"{kind} over level {level}", str(goal), str(states[level]), "at the end ")
    return None


def _step(
    levels: Levels, places: Mapping[int, int], states: list[LevelState], number: int, stage: LevelStage
) -> Counterexample | None:
    """Check that the preconditions of `stage`, the stage with index `number`, hold in `states`.

    `places` are the root's coordinates at each level. Returns a counterexample, or None if they hold.
    """
    subject = f"stage {number}, {stage.kind} at level {stage.level},"
    needs, _ = HOLDERS[stage.kind]
    state = states[stage.level]
    if state.holds is not needs:
        return _wrong(subject, needs.value, state.holds.value)
    if stage.kind in REDUCING and state.summed:
        return _wrong(subject, "every contribution once", f"the sums of level {stage.level} once more")
    if stage.kind in ROOTED and stage.root != places[stage.level]:
        return _wrong(subject, f"root {places[stage.level]}", f"root {stage.root}")
    other_levels = [level for level, (_, ranks) in enumerate(levels) if ranks > 1 and level != stage.level]
    fixed = [level for level in other_levels if states[level].holds is Holders.ROOT]
    if fixed != sorted(set(stage.fixed) & set(other_levels)):
        return _wrong(subject, f"groups at the root's place of levels {fixed}", f"levels {list(stage.fixed)}")
    owned = [level for level in other_levels if states[level].holds is Holders.OWN]
    share = Fraction(1, math.prod(levels[level][1] for level in owned))
    if share != stage.share:
        return _wrong(subject, f"{share} of the buffer", f"{stage.share}")
    return None


def _wrong(subject: str, expected: str, actual: str, prefix: str = "") -> Counterexample:
    message = f"{prefix}{subject} needs {expected}, and has {actual}"
    return Counterexample("wrong", (), (), None, expected, actual, message)
