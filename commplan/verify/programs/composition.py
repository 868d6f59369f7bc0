"""Hierarchical programs proved from the programs of their levels.

Ranks have a place at every level, chunks a part at every level, and what is known of a moment between two
stages is the same sentence for each level: who holds a chunk (`Holders`), and whether the contributions of
all places are in it. A rank holds a chunk if the sentences of all levels are true of it. A stage is one
collective within all groups of a level; the members of a group differ at that level alone, so that they hold
the same parts of all others, and what the stage promises within a group, its own proof given, changes the
sentence of its level and no other. Stages follow each other in every rank, every message has both ends in one
round of one stage: what is free of deadlock alone is so in a row.

Where a broadcast goes by shards, `hierarchical` leaves out what its receivers hold already, and it makes a
reduce as the reversal of such a broadcast. Leaving out copies of what is there changes nobody's slots; and
where every slot is written once, the reversed paths carry every contribution once. The tests prove both
directly as well.

Sums stay alike bit by bit: ranks that differ in a place whose contributions are in, and hold the same chunk,
have copied it, or have added equal values by one program in one order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from commplan.collectives.hierarchical import Levels, LevelStage, places_of
from commplan.collectives.postcondition import HOLDERS, Holders
from commplan.collectives.program import REDUCING, ROOTED, Kind
from commplan.verify.programs.counterexample import Counterexample


class Known(NamedTuple):
    """What is known of one level. summed: the contributions of all its places are in."""

    holds: Holders
    summed: bool

    def __str__(self) -> str:
        return f"{self.holds.value}{', summed' if self.summed else ''}"


class Task(NamedTuple):
    """A program to be proved for a level: `native` is not."""

    algorithm: str
    kind: Kind
    ranks: int
    root: int


def task_of(levels: Levels, stage: LevelStage) -> Task:
    """The program of one stage. Only some kinds have a root."""
    return Task(stage.algorithm, stage.kind, levels[stage.level][1], stage.own_root)


def compose(levels: Levels, kind: Kind, stages: Sequence[LevelStage], root: int = 0) -> Counterexample | None:
    """Why the stages do not add up to `kind` over all ranks, each stage taken as proved; None: they do.

    levels: algorithm and ranks, innermost first.
    """
    before, after = HOLDERS[kind]
    places = places_of(levels, root)
    known = [Known(before, False) for _ in levels]
    for number, stage in enumerate(stages):
        wrong = _step(levels, places, known, number, stage)
        if wrong is not None:
            return wrong
        summed = known[stage.level].summed or stage.kind in REDUCING
        known[stage.level] = Known(HOLDERS[stage.kind][1], summed)
    wanted = Known(after, kind in REDUCING)
    for level, (_, ranks) in enumerate(levels):
        if ranks > 1 and known[level] != wanted:
            return _wrong(f"{kind} over level {level}", str(wanted), str(known[level]), "at the end ")
    return None


def _step(
    levels: Levels, places: Mapping[int, int], known: list[Known], number: int, stage: LevelStage
) -> Counterexample | None:
    """Whether what `stage` needs is known."""
    subject = f"stage {number}, {stage.kind} at level {stage.level},"
    needs, _ = HOLDERS[stage.kind]
    now = known[stage.level]
    if now.holds is not needs:
        return _wrong(subject, needs.value, now.holds.value)
    if stage.kind in REDUCING and now.summed:
        return _wrong(subject, "every contribution once", f"the sums of level {stage.level} once more")
    if stage.kind in ROOTED and stage.root != places[stage.level]:
        return _wrong(subject, f"root {places[stage.level]}", f"root {stage.root}")
    others = [level for level, (_, ranks) in enumerate(levels) if ranks > 1 and level != stage.level]
    fixed = [level for level in others if known[level].holds is Holders.ROOT]
    if fixed != sorted(set(stage.fixed) & set(others)):
        return _wrong(subject, f"groups at the root's place of levels {fixed}", f"levels {list(stage.fixed)}")
    owned = [level for level in others if known[level].holds is Holders.OWN]
    share = Fraction(1, math.prod(levels[level][1] for level in owned))
    if share != stage.share:
        return _wrong(subject, f"{share} of the buffer", f"{stage.share}")
    return None


def _wrong(subject: str, expected: str, actual: str, when: str = "") -> Counterexample:
    message = f"{when}{subject} needs {expected}, and has {actual}"
    return Counterexample("wrong", (), (), None, expected, actual, message)
