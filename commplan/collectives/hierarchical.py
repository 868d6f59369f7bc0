"""hierarchical: a collective over several levels, as collectives within the levels with one algorithm each.

Levels are listed innermost first, and rank = (c2*n1 + c1)*n0 + c0 for the places c0, c1, c2 at levels of n0,
n1, n2 ranks. At each level, the ranks that differ only in that place form a group. `stages` lists the
collectives, and `composed` writes them out as rounds over all ranks:

    all_reduce       reduce_scatter inside, all_reduce across on each rank's shard, all_gather inside
    reduce_scatter   inside first, then across: outer levels carry sums, shared among the ranks
    all_gather       the reversal: across first, then inside
    broadcast        scatter inside the root's group, broadcast across on each shard, all_gather inside
    reduce           the reversal: reduce_scatter inside, reduce across, gather inside the root's group
    scatter, gather  scatter inside first; gather inside last
    swap             inside first: blocks for one place of other groups are collected there and cross together

so the inner ranks share the traffic of outer levels: each sends or receives 1/n0 of it.

An all_reduce or broadcast differs if the algorithm of an inner level lacks some of these kinds. Without
reduce_scatter (or scatter) and all_gather, one rank represents each group: reduce, all_reduce among the
representatives, broadcast. If the algorithm has no reduce and broadcast either, an all_reduce inside is
followed by one across, on the whole buffer: the fewest rounds, and the most bytes.

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

# The name of the backend's own collectives, which have no rounds.
NATIVE = "native"
# By kind, the kind that results from reversing its transfers.
REVERSAL: dict[Kind, Kind] = {
    "broadcast": "reduce",
    "reduce": "broadcast",
    "scatter": "gather",
    "gather": "scatter",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
}

# The modules with algorithms, by name.
Files = Mapping[str, AlgorithmFile]
# The algorithm and the number of ranks of each level, innermost first.
Levels = Sequence[tuple[str, int]]


class LevelStage(NamedTuple):
    """A collective that runs in all groups of one level at once.

    Attributes:
        level: The index of the level, 0 for the innermost.
        algorithm: The name of the algorithm, which may be `native`.
        kind: The kind of collective.
        root: The place at this level of the overall root. The ranks of the program are shifted by it even if
            `kind` has no root.
        share: The size of the stage's buffer as a fraction of the overall buffer.
        fixed: Indices of other levels. A group runs only if its members have the root's place at all of these
            levels. If it is empty, all groups run.
    """

    level: int
    algorithm: str
    kind: Kind
    root: int
    share: Fraction
    fixed: tuple[int, ...] = ()

    @property
    def own_root(self) -> int:
        """The root of the stage's program; 0 for a kind without a root."""
        return self.root if self.kind in ROOTED else 0


def stages(files: Files, levels: Levels, kind: Kind, root: int = 0) -> tuple[LevelStage, ...]:
    """The collectives of all levels, in order; empty if all levels have one rank.

    Args:
        files: The algorithms by name.
        levels: The levels; those of one rank have no stages.
        kind: The collective over all levels.
        root: The root among all ranks, 0 if `kind` has none.

    Raises:
        CommplanError: CP0739 if the algorithm of a level does not support the kind of its stage.
    """
    return tuple(_check_stage(files, stage) for stage in _stages(files, levels, kind, root))


def _stages(files: Files, levels: Levels, kind: Kind, root: int) -> tuple[LevelStage, ...]:
    """As `stages`, without checks. Three kinds are the reversal of another one."""
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
    """The stages of an all_reduce or broadcast, which call this function again for the outer levels.

    Args:
        files: The algorithms by name.
        levels: All levels.
        kind: `all_reduce` or `broadcast`.
        used: The indices of the remaining levels, innermost first.
        share: The fraction of the overall buffer.
        fixed: As in `LevelStage`.
    """
    if not used:
        return
    (index, *outer), (name, n) = used, levels[used[0]]
    outside = tuple(outer)
    before: Kind = "reduce_scatter" if kind == "all_reduce" else "scatter"
    has_shards = carries(files, name, before, "all_gather")
    if not outside and (carries(files, name, kind) or not has_shards):
        yield LevelStage(index, name, kind, 0, share, fixed)
    elif has_shards:
        # Only the root's group has data to scatter. The other groups receive their shards across.
        yield LevelStage(index, name, before, 0, share, fixed + outside if before == "scatter" else fixed)
        yield from _whole(files, levels, kind, outside, share / n, fixed)
        yield LevelStage(index, name, "all_gather", 0, share, fixed)
    elif kind == "all_reduce" and not carries(files, name, "reduce", "broadcast"):
        yield LevelStage(index, name, kind, 0, share, fixed)
        yield from _whole(files, levels, kind, outside, share, fixed)
    else:
        # The ranks at the root's place represent their groups across.
        if kind == "all_reduce":
            yield LevelStage(index, name, "reduce", 0, share, fixed)
        yield from _whole(files, levels, kind, outside, share, (*fixed, index))
        yield LevelStage(index, name, "broadcast", 0, share, fixed)


def carries(files: Files, name: str, *kinds: Kind) -> bool:
    """Whether algorithm `name`, which is in `files` or `native`, supports all of `kinds`."""
    supported = collective_kinds.NATIVE_KINDS if name == NATIVE else files[name].PROGRAMS
    return all(kind in supported for kind in kinds)


def _check_stage(files: Files, stage: LevelStage) -> LevelStage:
    if carries(files, stage.algorithm, stage.kind):
        return stage
    takes = ", ".join(f"`{name}`" for name in (*files, NATIVE) if carries(files, name, stage.kind))
    message = f"a level of a hierarchy needs {stage.kind}, and `{stage.algorithm}` does not carry it out"
    return fail("CP0739", message, f"{stage.kind} takes {takes}")


def composed(files: Files, levels: Levels, kind: Kind, root: int = 0) -> RoundSequence:
    """All stages one after another, as rounds over all ranks. Arguments are those of `stages`.

    Raises:
        CommplanError: CP0739 if a level is `native`, which has no rounds, or as `stages` does.
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
    """As `composed`, for a kind other than reduce.

    Args:
        backwards: Whether the caller reverses the result. Then no rank sends a chunk twice in a round, since
            in the reversal two sums would arrive in one slot.
    """
    level_stages = stages(files, levels, kind, root)
    bodies = [_program(files, stage, levels[stage.level][1], backwards) for stage in level_stages]
    layout = _LevelLayout.from_stages([n for _, n in levels], kind, level_stages, bodies)
    rounds: list[Round] = []
    for stage, body in zip(level_stages, bodies, strict=True):
        rounds += layout.spread(stage, body, root)
    if kind == "broadcast" and any(stage.kind == "scatter" for stage in level_stages):
        condition = postcondition(kind, layout.ranks, layout.chunks, root)
        return RoundSequence(layout.chunks, pruned(rounds, *condition))
    return RoundSequence(layout.chunks, rounds)


def _program(files: Files, stage: LevelStage, n: int, backwards: bool) -> ChunkProgram:
    """The program of a stage for one group of `n` ranks; `backwards` is as in `_compose`."""
    kind = stage.kind
    if backwards and kind == "broadcast":
        body = files[stage.algorithm].PROGRAMS["reduce"](n)
        body = RoundSequence(body.chunks, reversed_rounds(body.rounds, reduce=False))
    else:
        body = files[stage.algorithm].PROGRAMS[kind](n)
    program = ChunkProgram(stage.algorithm, kind, n, body.chunks, drop_empty(body.rounds))
    return rooted(program, stage.root)


class _LevelLayout(NamedTuple):
    """The numbering of ranks and chunks by level, innermost level first.

    A chunk is identified by one part per level, as a rank is by one place per level.

    Attributes:
        sizes: The number of ranks at each level.
        radix: The number of parts at each level; their product is the number of chunks.
        digit: The part of each chunk at each level, [levels, chunks].
        owned: For each level, whether part c belongs to the ranks at place c. If so, there are as many parts
            as ranks.
    """

    sizes: tuple[int, ...]
    radix: tuple[int, ...]
    digit: Ints
    owned: tuple[bool, ...]

    @classmethod
    def from_stages(
        cls,
        sizes: Sequence[int],
        kind: Kind,
        level_stages: Sequence[LevelStage],
        bodies: Sequence[ChunkProgram],
    ) -> _LevelLayout:
        """The numbering for a collective.

        Blocks are in rank order: the innermost level varies fastest. Otherwise it varies slowest, so that the
        chunks of an inner rank are contiguous.

        Args:
            sizes: The number of ranks at each level.
            kind: The collective over all levels.
            level_stages: Its stages.
            bodies: The program of each stage for one group.
        """
        owned = [kind in BLOCKED] * len(sizes)
        radix = list(sizes) if kind in IN_BLOCKS else [1] * len(sizes)
        for stage, body in zip(level_stages, bodies, strict=True):
            owned[stage.level] |= stage.kind in BLOCKED
            radix[stage.level] = math.lcm(radix[stage.level], body.chunks)
        digit = _digits(radix) if kind in IN_BLOCKS else _digits(radix[::-1])[::-1]
        return cls(tuple(sizes), tuple(radix), digit, tuple(owned))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self.digit.shape[1]

    def spread(self, stage: LevelStage, body: ChunkProgram, root: int) -> Iterator[Round]:
        """The rounds of `body`, a program for one group, for all groups of its stage at once."""
        level = stage.level
        place = _digits(self.sizes)
        # The groups that run, each as its first member. Its members are `stride` apart.
        fixed = (place[other] == place[other, root] for other in stage.fixed)
        groups = np.flatnonzero(np.all([place[level] == 0, *fixed], axis=0))
        stride = math.prod(self.sizes[:level])
        # Inner stages have distributed the buffer among the places of inner levels. `owner` is the place of
        # each chunk, over all these levels, and `member` that of each rank.
        inside = [inner for inner in range(level) if self.owned[inner]]
        part = self.digit[level] * body.chunks // self.radix[level]
        owner = np.zeros_like(part)
        member = np.zeros(self.ranks, np.int64)
        for inner in inside:
            owner = owner * self.sizes[inner] + self.digit[inner]
            member = member * self.sizes[inner] + place[inner]
        owners = math.prod(self.sizes[inner] for inner in inside)
        # The chunks of each chunk of `body`, by owner: [owners, chunks of body, chunks in each].
        parts = np.argsort(owner * body.chunks + part, kind="stable").reshape(owners, body.chunks, -1)
        chunks = parts[member[groups]]
        for sends in body.rounds:
            yield tuple(_send_in_groups(send, groups, stride, chunks) for send in sends)


def _digits(radix: Sequence[int]) -> Ints:
    """The digits [levels, numbers] of the numbers 0 to product(radix) - 1; the first varies fastest."""
    numbers = np.arange(math.prod(radix), dtype=np.int64)
    return np.stack(np.unravel_index(numbers, tuple(radix)[::-1]))[::-1]


def _send_in_groups(send: Family, groups: Ints, stride: int, chunks: Ints) -> Send:
    """`send`, a part of a program for one group, in all `groups`.

    Args:
        send: The transfers, between places in a group.
        groups: The first member of each group, [groups].
        stride: The difference between the ranks of adjacent members of a group.
        chunks: The chunks of the overall buffer that form each chunk of the group's program, which is called
            a part here: [groups, parts, chunks per part].
    """
    per_part = chunks.shape[2]
    # A run of adjacent parts is one run of chunks if all chunks of a group are consecutive. If only the
    # chunks with the same index in each part are, it is a run for each index. Otherwise each chunk is a
    # transfer, and `runs` joins those that happen to be adjacent.
    one_run = _consecutive(chunks, 2) and bool(np.all(chunks[:, 1:, 0] == chunks[:, :-1, -1] + 1))
    is_expanded = not one_run and not _consecutive(chunks, 1)
    if is_expanded:
        src, dst, first = expand_runs(send)
        part_count = np.ones_like(first)
    else:
        src, dst, first, part_count = send.src, send.dst, send.chunk, send.count
    begins = chunks[:, first, : 1 if one_run else per_part]
    shape = begins.shape
    count = np.broadcast_to((part_count * (per_part if one_run else 1))[None, :, None], shape)
    whole_src = np.broadcast_to((groups[:, None] + src[None] * stride)[:, :, None], shape)
    whole_dst = np.broadcast_to((groups[:, None] + dst[None] * stride)[:, :, None], shape)
    sent = Send(whole_src.ravel(), whole_dst.ravel(), begins.ravel(), count.ravel(), send.reduce)
    return runs(*expand_runs(sent), send.reduce) if is_expanded else sent


def _consecutive(chunks: Ints, axis: int) -> bool:
    """Whether the chunks are consecutive along `axis`."""
    return bool(np.all(np.diff(chunks, axis=axis) == 1))
