"""hierarchical: a collective over several levels, as collectives within the levels with one algorithm each.

Levels are listed innermost first, and rank = (c2*n1 + c1)*n0 + c0 for the places c0, c1, c2 at levels of n0,
n1, n2. At each level, the ranks that differ only in that place form a group. `stages` lists the collectives:

    all_reduce       reduce_scatter inside, all_reduce across on each rank's shard, all_gather inside
    reduce_scatter   inside first, then across: outer levels carry sums, shared among the ranks
    all_gather       the reversal: across first, then inside
    broadcast        scatter inside the root's group, broadcast across on each shard, all_gather inside
    reduce           the reversal: reduce_scatter inside, reduce across, gather inside the root's group
    scatter, gather  scatter inside first; gather inside last
    swap             inside first: blocks for one place of other groups are collected there and cross together

so the inner ranks share the traffic of outer levels: each sends or receives 1/n0 of it. If the algorithm of
an inner level has no reduce_scatter (or scatter) and all_gather, one rank represents each group: reduce,
all_reduce among the representatives, broadcast. If it has only all_reduce, there is one inside and then one
across, on the whole buffer: the fewest rounds, and the most bytes.

In a broadcast by shards, the all_gather would send the root's group data that its members already have. These
transfers are omitted. A reduce is the reversal of that, so that no term is counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.postcondition import postcondition
from commplan.collectives.program import (
    IN_BLOCKS,
    AlgorithmFile,
    ChunkProgram,
    Family,
    Ints,
    Kind,
    Round,
    RoundSequence,
    Send,
)
from commplan.collectives.transform import drop_empty, expand_runs, pruned, reversed_rounds, rooted, runs
from commplan.diagnostics import fail
from commplan.ir import collective_kinds
from commplan.ir.axes import coordinates
from commplan.ir.collective_kinds import BLOCKED, ROOTED

NATIVE = "native"
# The kind that results from reversing the transfers of a kind.
REVERSAL: dict[Kind, Kind] = {
    "broadcast": "reduce",
    "reduce": "broadcast",
    "scatter": "gather",
    "gather": "scatter",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
}

Files = Mapping[str, AlgorithmFile]
Levels = Sequence[tuple[str, int]]


class LevelStage(NamedTuple):
    """A collective that runs in all groups of one level at once.

    Attributes:
        level: The index of the level, 0 for the innermost.
        algorithm: The algorithm.
        kind: The kind of collective.
        root: The place of the overall root within its group. Ranks are renamed with it even if `kind` has no
            root.
        share: The size of its buffer as a fraction of the overall buffer.
        fixed: Levels at which only groups run whose members have the root's place.
    """

    level: int
    algorithm: str
    kind: Kind
    root: int
    share: Fraction
    fixed: tuple[int, ...] = ()

    @property
    def own_root(self) -> int:
        """The root of its program; 0 for a kind without one."""
        return self.root if self.kind in ROOTED else 0


def stages(files: Files, levels: Levels, kind: Kind, root: int = 0) -> tuple[LevelStage, ...]:
    """The collectives of all levels, in order, without levels of one rank.

    Raises CP0739 if the algorithm of a level supports none of the kinds that the level can use.
    """
    return tuple(_check_stage(files, each) for each in _stages(files, levels, kind, root))


def _stages(files: Files, levels: Levels, kind: Kind, root: int) -> tuple[LevelStage, ...]:
    if kind in ("reduce", "gather", "all_gather"):
        forward = _stages(files, levels, REVERSAL[kind], root)
        return tuple(stage._replace(kind=REVERSAL[stage.kind]) for stage in reversed(forward))
    used = tuple(index for index, (_, n) in enumerate(levels) if n > 1)
    places = places_of(levels, root)
    if kind == "swap":
        collectives = (LevelStage(index, levels[index][0], kind, 0, Fraction(1)) for index in used)
    elif kind in BLOCKED:
        collectives = _blocks(levels, kind, used)
    else:
        collectives = _whole(files, levels, kind, used, Fraction(1), ())
    return tuple(stage._replace(root=places[stage.level]) for stage in collectives)


def places_of(levels: Levels, root: int) -> dict[int, int]:
    """The place of rank `root` at each level."""
    sizes = {level: size for level, (_, size) in enumerate(levels)}
    return coordinates(root, reversed(sizes), sizes)


def _blocks(levels: Levels, kind: Kind, used: tuple[int, ...]) -> Iterator[LevelStage]:
    """The stages of reduce_scatter and scatter, from the innermost level outwards."""
    share = Fraction(1)
    for position, index in enumerate(used):
        name, n = levels[index]
        yield LevelStage(index, name, kind, 0, share, used[position + 1 :] if kind == "scatter" else ())
        share /= n


def _whole(
    files: Files, levels: Levels, kind: Kind, used: tuple[int, ...], share: Fraction, fixed: tuple[int, ...]
) -> Iterator[LevelStage]:
    """The stages of all_reduce and broadcast over the levels `used`, on a fraction `share` of the buffer.

    Only groups with the root's place at the levels `fixed` run.
    """
    if not used:
        return
    (index, *outer), (name, n) = used, levels[used[0]]
    outside = tuple(outer)
    before: Kind = "reduce_scatter" if kind == "all_reduce" else "scatter"
    shards = carries(files, name, before, "all_gather")
    if not outside and (carries(files, name, kind) or not shards):
        yield LevelStage(index, name, kind, 0, share, fixed)
    elif shards:
        yield LevelStage(index, name, before, 0, share, fixed + outside if before == "scatter" else fixed)
        yield from _whole(files, levels, kind, outside, share / n, fixed)
        yield LevelStage(index, name, "all_gather", 0, share, fixed)
    elif kind == "all_reduce" and not carries(files, name, "reduce", "broadcast"):
        yield LevelStage(index, name, kind, 0, share, fixed)
        yield from _whole(files, levels, kind, outside, share, fixed)
    else:
        if kind == "all_reduce":
            yield LevelStage(index, name, "reduce", 0, share, fixed)
        yield from _whole(files, levels, kind, outside, share, (*fixed, index))
        yield LevelStage(index, name, "broadcast", 0, share, fixed)


def carries(files: Files, name: str, *kinds: Kind) -> bool:
    """Whether algorithm `name`, which may be `native`, supports all of `kinds`."""
    supported = collective_kinds.NATIVE_KINDS if name == NATIVE else files[name].PROGRAMS
    return all(kind in supported for kind in kinds)


def _check_stage(files: Files, stage: LevelStage) -> LevelStage:
    if carries(files, stage.algorithm, stage.kind):
        return stage
    takes = ", ".join(f"`{name}`" for name in (*files, NATIVE) if carries(files, name, stage.kind))
    message = f"a level of a hierarchy needs {stage.kind}, and `{stage.algorithm}` does not carry it out"
    return fail("CP0739", message, f"{stage.kind} takes {takes}")


def composed(files: Files, levels: Levels, kind: Kind, root: int = 0) -> RoundSequence:
    """All stages one after another, as rounds over all ranks.

    Raises CP0739 if a level is `native`, which has no rounds.
    """
    if any(name == NATIVE for name, _ in levels):
        fail("CP0739", "`native` is the backend's own and has no rounds", "name an algorithm for each level")
    if kind == "reduce":
        down = _compose(files, levels, "broadcast", root, backwards=True)
        return RoundSequence(down.chunks, reversed_rounds(down.rounds, reduce=True))
    return _compose(files, levels, kind, root)


def _compose(
    files: Files, levels: Levels, kind: Kind, root: int, *, backwards: bool = False
) -> RoundSequence:
    """Compose all stages.

    With `backwards`, the result will be reversed, so no rank sends a chunk twice in a round, where two sums
    would collide.
    """
    plan = stages(files, levels, kind, root)
    bodies = [_program(files, stage, levels[stage.level][1], backwards) for stage in plan]
    space = _LevelLayout.from_stages([n for _, n in levels], kind, plan, bodies)
    rounds: list[Round] = []
    for stage, body in zip(plan, bodies, strict=True):
        rounds += space.spread(stage, body, root)
    if kind == "broadcast" and any(stage.kind == "scatter" for stage in plan):
        condition = postcondition(kind, space.ranks, space.chunks, root)
        return RoundSequence(space.chunks, pruned(rounds, *condition))
    return RoundSequence(space.chunks, rounds)


def _program(files: Files, stage: LevelStage, n: int, backwards: bool) -> ChunkProgram:
    kind = stage.kind
    if backwards and kind == "broadcast":
        body = files[stage.algorithm].PROGRAMS["reduce"](n)
        body = RoundSequence(body.chunks, reversed_rounds(body.rounds, reduce=False))
    else:
        body = files[stage.algorithm].PROGRAMS[kind](n)
    program = ChunkProgram(stage.algorithm, kind, n, body.chunks, drop_empty(body.rounds))
    return rooted(program, stage.root)


class _LevelLayout(NamedTuple):
    """The numbering of ranks and chunks by level.

    Attributes:
        sizes: The number of ranks at each level.
        radix: The number of parts into which chunks are divided at each level.
        digit: The part of each chunk at each level, [levels, chunks].
        owned: For each level, whether part c belongs to the ranks at place c.
    """

    sizes: tuple[int, ...]
    radix: tuple[int, ...]
    digit: Ints
    owned: tuple[bool, ...]

    @classmethod
    def from_stages(
        cls, sizes: Sequence[int], kind: Kind, plan: Sequence[LevelStage], bodies: Sequence[ChunkProgram]
    ) -> _LevelLayout:
        """The numbering for the collectives of `plan`.

        Blocks are in rank order: the innermost level varies fastest. Otherwise it varies slowest, so that the
        chunks of an inner rank are contiguous.
        """
        owned = [kind in BLOCKED] * len(sizes)
        radix = list(sizes) if kind in IN_BLOCKS else [1] * len(sizes)
        for stage, body in zip(plan, bodies, strict=True):
            owned[stage.level] |= stage.kind in BLOCKED
            radix[stage.level] = math.lcm(radix[stage.level], body.chunks)
        digit = _digits(radix) if kind in IN_BLOCKS else _digits(radix[::-1])[::-1]
        return cls(tuple(sizes), tuple(radix), digit, tuple(owned))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def chunks(self) -> int:
        return self.digit.shape[1]

    def spread(self, stage: LevelStage, body: ChunkProgram, root: int) -> Iterator[Round]:
        """The rounds of `body`, a program for one group, for all groups of its stage at once."""
        level = stage.level
        place = _digits(self.sizes)
        inside = [inner for inner in range(level) if self.owned[inner]]
        # A group is identified by its first member; `parts` are the chunks of each part of the buffer, by
        # owner.
        fixed = (place[at] == place[at, root] for at in stage.fixed)
        groups = np.flatnonzero(np.all([place[level] == 0, *fixed], axis=0))
        step = math.prod(self.sizes[:level])
        part = self.digit[level] * body.chunks // self.radix[level]
        owner = np.zeros_like(part)
        member = np.zeros(self.ranks, np.int64)
        for inner in inside:
            owner = owner * self.sizes[inner] + self.digit[inner]
            member = member * self.sizes[inner] + place[inner]
        owners = math.prod(self.sizes[inner] for inner in inside)
        parts = np.argsort(owner * body.chunks + part, kind="stable").reshape(owners, body.chunks, -1)
        chunks = parts[member[groups]]
        for each in body.rounds:
            yield tuple(_send_in_groups(send, groups, step, chunks) for send in each)


def _digits(radix: Sequence[int]) -> Ints:
    """The digits [levels, numbers] of all numbers; the first digit varies fastest."""
    numbers = np.arange(math.prod(radix), dtype=np.int64)
    return np.stack(np.unravel_index(numbers, tuple(radix)[::-1]))[::-1]


def _send_in_groups(send: Family, groups: Ints, step: int, chunks: Ints) -> Send:
    """`send` in each of `groups`, whose members are `step` apart.

    `chunks` [groups, parts, chunks per part] are the chunks of the overall buffer.
    """
    one_run = _steps(chunks, 2) and bool(np.all(chunks[:, 1:, 0] == chunks[:, :-1, -1] + 1))
    if one_run or _steps(chunks, 1):
        src, dst, first, many = send.src, send.dst, send.chunk, send.count
        width, apart = 1 if one_run else chunks.shape[2], False
    else:
        src, dst, first = expand_runs(send)
        many, width, apart = np.ones_like(first), chunks.shape[2], True
    begins = chunks[:, first, :width]
    shape = begins.shape
    count = np.broadcast_to((many * (chunks.shape[2] if one_run else 1))[None, :, None], shape)
    whole_src = np.broadcast_to((groups[:, None] + src[None] * step)[:, :, None], shape)
    whole_dst = np.broadcast_to((groups[:, None] + dst[None] * step)[:, :, None], shape)
    sent = Send(whole_src.ravel(), whole_dst.ravel(), begins.ravel(), count.ravel(), send.reduce)
    return sent if one_run or not apart else runs(*expand_runs(sent), send.reduce)


def _steps(chunks: Ints, axis: int) -> bool:
    """Whether the chunks are consecutive along `axis`."""
    return bool(np.all(np.diff(chunks, axis=axis) == 1))
