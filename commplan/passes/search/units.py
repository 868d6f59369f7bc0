"""The units of the search: stages for which the bucket size, the message size or the algorithm is open."""

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
    """The collectives of a stage, or of several stages that share buckets.

    Attributes:
        key: The key of the stages.
        collective: The largest one.
        nbytes: Bytes of one rank's operands, over all collectives.
        packs: Whether the compiler chooses the bucket size.
        chooses: Whether the compiler chooses the algorithm.
        cuts: Whether the compiler chooses the message size.
        leaves: Bytes of each leaf in one rank's operands, in packing order; empty if nothing is packed.
    """

    key: StageKey
    collective: Collective
    nbytes: int
    packs: bool
    chooses: bool
    cuts: bool
    leaves: tuple[int, ...] = ()


def units(schedule: Schedule, phase: Phase, passes: Sequence[Pass]) -> list[Unit]:
    """The units of a phase, the one with the most bytes first. Stages without open choices are omitted.

    Args:
        schedule: The schedule after the pass `bucket`.
        phase: One of its phases.
        passes: The passes from `bucket` on. Their options may fix a choice.
    """
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
        is_packed = isinstance(uses.maker(largest.operand), Pack) and largest.hints.bucket is None
        is_native = largest.pinned and largest.algorithm == NATIVE
        unit = Unit(
            key,
            largest,
            sum(op.nbytes for op in ops),
            packs=packs and is_packed and largest.hints.overlap != "update",
            chooses=chooses and not largest.pinned and not largest.algorithm.levels,
            cuts=chooses and schedule.backend == "mpi" and largest.hints.chunk is None and not is_native,
            leaves=leaves,
        )
        if unit.packs or unit.chooses or unit.cuts:
            result.append(unit)
    return sorted(result, key=lambda unit: -unit.nbytes)


def _leaf_bytes(op: Collective, pack: Pack) -> list[int]:
    """Bytes of each part of the buffer of `op`. The rows of a scatter count together."""
    sizes = [part.size for part in pack.parts]
    return [op.nbytes * size // max(1, sum(sizes)) for size in sizes]


def stages_separate(phase: Phase, packed: Phase) -> Choices:
    """Choices that give each stage of a phase separate buckets; empty if no stages share any.

    `phase` and `packed` are the phase before and after the pass `bucket`. Stages that share buckets have one
    key after it.
    """
    keys, packed_keys = (
        dict.fromkeys(key_of(each, op) for op in each.ops if isinstance(op, Collective))
        for each in (phase, packed)
    )
    return {key: StageChoice(separate=True) for key in keys} if len(packed_keys) < len(keys) else NO_CHOICES
