"""The units of the search: bucket size, message size and algorithm for the collectives of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commplan.collectives.program import KINDS
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.schedule import Collective, Pack, Phase, Schedule
from commplan.passes.base import NO_CHOICES, Choices, Pass, StageChoice, StageKey, key_of
from commplan.passes.bucket.bucket import BucketPass
from commplan.select.options import NATIVE


class Unit(NamedTuple):
    """The collectives of a stage, or of several that share buckets.

    Attributes:
        key: the key of the stages.
        collective: the largest one.
        nbytes: bytes of one rank's operands, over all collectives.
        packs: whether the compiler chooses the bucket size.
        chooses: whether the compiler chooses the algorithm.
        cuts: whether the compiler chooses the message size.
        leaves: bytes of each leaf, in packing order.
    """

    key: StageKey
    collective: Collective
    nbytes: int
    packs: bool
    chooses: bool
    cuts: bool
    leaves: tuple[int, ...] = ()


def units(schedule: Schedule, phase: Phase, passes: Sequence[Pass]) -> list[Unit]:
    """The units of `phase`, which `bucket` has packed, the one with the most bytes first."""
    names = {pass_.name for pass_ in passes}
    packs = any(isinstance(pass_, BucketPass) and pass_.max is None for pass_ in passes)
    chooses = {"decompose", "select"} <= names
    uses = DefUse(phase.ops)
    groups: dict[StageKey, list[Collective]] = {}
    for op in phase.ops:
        if isinstance(op, Collective) and op.kind in KINDS and schedule.size(op.axes) > 1:
            groups.setdefault(key_of(phase, op), []).append(op)
    result: list[Unit] = []
    for key, ops in groups.items():
        largest = max(ops, key=lambda op: op.nbytes)
        packs_of = [(op, maker) for op in ops if isinstance(maker := uses.maker(op.operand), Pack)]
        leaves = tuple(nbytes for op, pack in packs_of for nbytes in _leaf_bytes(op, pack))
        packed = isinstance(uses.maker(largest.operand), Pack) and largest.hints.bucket is None
        free = chooses and not largest.pinned and not largest.algorithm.levels
        native = largest.pinned and largest.algorithm == NATIVE
        unit = Unit(
            key, largest, sum(op.nbytes for op in ops),
            packs and packed and largest.hints.overlap != "update", free,
            chooses and schedule.backend == "mpi" and largest.hints.chunk is None and not native, leaves,
        )  # fmt: skip
        if unit.packs or unit.chooses or unit.cuts:
            result.append(unit)
    return sorted(result, key=lambda unit: -unit.nbytes)


def _leaf_bytes(op: Collective, pack: Pack) -> list[int]:
    """Bytes of each leaf of the buffer of `op`; of a scatter, of all rows that it sends."""
    sizes = [part.size for part in pack.parts]
    return [op.nbytes * size // max(1, sum(sizes)) for size in sizes]


def stages_separate(phase: Phase, packed: Phase) -> Choices:
    """Choices that give each stage of `phase` separate buckets; empty if no stages of `packed` share any."""
    keys, shared = (
        dict.fromkeys(key_of(each, op) for op in each.ops if isinstance(op, Collective))
        for each in (phase, packed)
    )
    return {key: StageChoice(separate=True) for key in keys} if len(shared) < len(keys) else NO_CHOICES
