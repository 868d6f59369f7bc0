"""hierarchical: a collective over several levels, an algorithm per level, as collectives within the levels.

Levels are listed innermost first, and rank = (c2*n1 + c1)*n0 + c0 for the places c0, c1, c2 at levels of n0,
n1, n2. At each level the ranks that differ in that place alone are a group. `stages` says what runs:

    all_reduce       reduce_scatter inside, all_reduce across on each rank's shard, all_gather inside
    reduce_scatter   inside first, then across: what crosses is already summed, and shared among the ranks
    all_gather       the reversal: across first, then inside
    broadcast        scatter inside the root's group, broadcast across on each shard, all_gather inside
    reduce           the reversal: reduce_scatter inside, reduce across, gather inside the root's group
    scatter, gather  scatter inside first; gather inside last
    swap             inside first: blocks for one place of other groups are collected there and cross together

so the inner ranks share what crosses: each sends or receives there 1/n0 of what one for all of them would.
Where the algorithm of an inner level has no reduce_scatter (or scatter) and all_gather, one rank of each
group speaks for it: reduce, all_reduce among the speakers, broadcast. Where it has only all_reduce, there is
one inside and then one across, on the whole buffer: the fewest rounds, and the most bytes.

In a broadcast by shards, the root's group would be sent again what its members already have. Those transfers
are left out; and a reduce is made as the reversal of that, so that nobody's term is carried twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.postcondition import promise
from commplan.collectives.program import (
    BLOCKED,
    IN_BLOCKS,
    ROOTED,
    AlgorithmFile,
    Body,
    Family,
    Ints,
    Kind,
    Program,
    Round,
    Send,
)
from commplan.collectives.transform import pruned, reversed_rounds, rooted, runs, singles, tidy
from commplan.diagnostics import fail
from commplan.ir.axes import coordinates

NATIVE = "native"
# What `native` may be asked for at a level: what every backend has as an operation of its own.
NATIVE_KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
# What the same paths make when they are taken backwards.
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


class Stage(NamedTuple):
    """A collective within the groups of one level, all at once.

    level: its index, 0 the innermost. root: the place of the collective's root within its group; ranks are
    renamed with it, also where `kind` itself has none. share: the bytes of its whole buffer, as a share of
    those of the collective. fixed: only those groups run whose members stand, at these levels, where the root
    of the collective does.
    """

    level: int
    algorithm: str
    kind: Kind
    root: int
    share: Fraction
    fixed: tuple[int, ...] = ()

    @property
    def own_root(self) -> int:
        """The root of its program; 0 for a kind that has none."""
        return self.root if self.kind in ROOTED else 0


def stages(files: Files, levels: Levels, kind: Kind, root: int = 0) -> tuple[Stage, ...]:
    """What runs at which level, in order; levels of one rank take no part. Raises CP0739 where the
    algorithm of a level has nothing to take part with."""
    return tuple(_checked(files, each) for each in _stages(files, levels, kind, root))


def _stages(files: Files, levels: Levels, kind: Kind, root: int) -> tuple[Stage, ...]:
    if kind in ("reduce", "gather", "all_gather"):
        forward = _stages(files, levels, REVERSAL[kind], root)
        return tuple(stage._replace(kind=REVERSAL[stage.kind]) for stage in reversed(forward))
    used = tuple(index for index, (_, n) in enumerate(levels) if n > 1)
    places = places_of(levels, root)
    if kind == "swap":
        way = (Stage(index, levels[index][0], kind, 0, Fraction(1)) for index in used)
    elif kind in BLOCKED:
        way = _blocks(levels, kind, used)
    else:
        way = _whole(files, levels, kind, used, Fraction(1), ())
    return tuple(stage._replace(root=places[stage.level]) for stage in way)


def places_of(levels: Levels, root: int) -> dict[int, int]:
    """The place of rank `root` at each level."""
    sizes = {level: size for level, (_, size) in enumerate(levels)}
    return coordinates(root, reversed(sizes), sizes)


def _blocks(levels: Levels, kind: Kind, used: tuple[int, ...]) -> Iterator[Stage]:
    """reduce_scatter and scatter, from the inside out."""
    share = Fraction(1)
    for at, index in enumerate(used):
        name, n = levels[index]
        yield Stage(index, name, kind, 0, share, used[at + 1 :] if kind == "scatter" else ())
        share /= n


def _whole(
    files: Files, levels: Levels, kind: Kind, used: tuple[int, ...], share: Fraction, fixed: tuple[int, ...]
) -> Iterator[Stage]:
    """all_reduce and broadcast of the levels `used`, on `share`, where the root stands at levels `fixed`."""
    if not used:
        return
    (index, *rest), (name, n) = used, levels[used[0]]
    outside = tuple(rest)
    before: Kind = "reduce_scatter" if kind == "all_reduce" else "scatter"
    shards = carries(files, name, before, "all_gather")
    if not outside and (carries(files, name, kind) or not shards):
        yield Stage(index, name, kind, 0, share, fixed)
    elif shards:
        yield Stage(index, name, before, 0, share, fixed + outside if before == "scatter" else fixed)
        yield from _whole(files, levels, kind, outside, share / n, fixed)
        yield Stage(index, name, "all_gather", 0, share, fixed)
    elif kind == "all_reduce" and not carries(files, name, "reduce", "broadcast"):
        yield Stage(index, name, kind, 0, share, fixed)
        yield from _whole(files, levels, kind, outside, share, fixed)
    else:
        if kind == "all_reduce":
            yield Stage(index, name, "reduce", 0, share, fixed)
        yield from _whole(files, levels, kind, outside, share, (*fixed, index))
        yield Stage(index, name, "broadcast", 0, share, fixed)


def carries(files: Files, name: str, *kinds: Kind) -> bool:
    """Whether algorithm `name`, which may be `native`, carries out all of `kinds`."""
    known = NATIVE_KINDS if name == NATIVE else files[name].PROGRAMS
    return all(kind in known for kind in kinds)


def _checked(files: Files, stage: Stage) -> Stage:
    if carries(files, stage.algorithm, stage.kind):
        return stage
    takes = ", ".join(f"`{name}`" for name in (*files, NATIVE) if carries(files, name, stage.kind))
    message = f"a level of a hierarchy needs {stage.kind}, and `{stage.algorithm}` does not carry it out"
    return fail("CP0739", message, f"{stage.kind} takes {takes}")


def composed(files: Files, levels: Levels, kind: Kind, root: int = 0) -> Body:
    """All stages one after another, as rounds over all ranks. Raises CP0739 where a level is `native`,
    which has no rounds."""
    if any(name == NATIVE for name, _ in levels):
        fail("CP0739", "`native` is the backend's own and has no rounds", "name an algorithm for each level")
    if kind == "reduce":
        down = _composed(files, levels, "broadcast", root, backwards=True)
        return Body(down.chunks, reversed_rounds(down.rounds, reduce=True))
    return _composed(files, levels, kind, root)


def _composed(files: Files, levels: Levels, kind: Kind, root: int, *, backwards: bool = False) -> Body:
    """`backwards`: to be reversed: no rank sends a chunk twice in a round, where two sums would clash."""
    plan = stages(files, levels, kind, root)
    bodies = [_program(files, stage, levels[stage.level][1], backwards) for stage in plan]
    space = _Space.of([n for _, n in levels], kind, plan, bodies)
    rounds: list[Round] = []
    for stage, body in zip(plan, bodies, strict=True):
        rounds += space.spread(stage, body, root)
    if kind == "broadcast" and any(stage.kind == "scatter" for stage in plan):
        wanted = promise(kind, space.ranks, space.chunks, root)
        return Body(space.chunks, pruned(rounds, *wanted))
    return Body(space.chunks, rounds)


def _program(files: Files, stage: Stage, n: int, backwards: bool) -> Program:
    kind = stage.kind
    if backwards and kind == "broadcast":
        body = files[stage.algorithm].PROGRAMS["reduce"](n)
        body = Body(body.chunks, reversed_rounds(body.rounds, reduce=False))
    else:
        body = files[stage.algorithm].PROGRAMS[kind](n)
    program = Program(stage.algorithm, kind, n, body.chunks, tidy(body.rounds))
    return rooted(program, stage.root)


class _Space(NamedTuple):
    """How ranks and chunks of the whole are counted by level.

    sizes: ranks of each level. radix: into how many parts the chunks are cut at each level. digit: which of
    those each chunk is in, [levels, chunks]. owned: at which levels part c belongs to the ranks at place c.
    """

    sizes: tuple[int, ...]
    radix: tuple[int, ...]
    digit: Ints
    owned: tuple[bool, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], kind: Kind, plan: Sequence[Stage], bodies: Sequence[Program]) -> _Space:
        """Blocks are in rank order: the innermost level changes fastest. Else it changes slowest, so that
        what an inner rank owns is one run of chunks."""
        owned, radix = [kind in BLOCKED] * len(sizes), list(sizes) if kind in IN_BLOCKS else [1] * len(sizes)
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

    def spread(self, stage: Stage, body: Program, root: int) -> Iterator[Round]:
        """The rounds of `body`, which is for one group, for all groups of its stage at once."""
        level = stage.level
        place = _digits(self.sizes)
        inside = [inner for inner in range(level) if self.owned[inner]]
        # A group is named by its first member; `parts` are the chunks of each part of the buffer, by owner.
        fixed = (place[at] == place[at, root] for at in stage.fixed)
        groups = np.flatnonzero(np.all([place[level] == 0, *fixed], axis=0))
        step = math.prod(self.sizes[:level])
        part = self.digit[level] * body.chunks // self.radix[level]
        owner, member = np.zeros_like(part), np.zeros(self.ranks, np.int64)
        for inner in inside:
            owner = owner * self.sizes[inner] + self.digit[inner]
            member = member * self.sizes[inner] + place[inner]
        owners = math.prod(self.sizes[inner] for inner in inside)
        parts = np.argsort(owner * body.chunks + part, kind="stable").reshape(owners, body.chunks, -1)
        chunks = parts[member[groups]]
        for each in body.rounds:
            yield tuple(_spread(send, groups, step, chunks) for send in each)


def _digits(radix: Sequence[int]) -> Ints:
    """The digits [levels, numbers] of all numbers, of which the first changes fastest."""
    numbers = np.arange(math.prod(radix), dtype=np.int64)
    return np.stack(np.unravel_index(numbers, tuple(radix)[::-1]))[::-1]


def _spread(send: Family, groups: Ints, step: int, chunks: Ints) -> Send:
    """`send` in each of `groups`, whose members stand `step` apart; chunks [groups, parts, chunks of a part]
    are those of the whole."""
    one_run = _steps(chunks, 2) and bool(np.all(chunks[:, 1:, 0] == chunks[:, :-1, -1] + 1))
    if one_run or _steps(chunks, 1):
        src, dst, first, many = send.src, send.dst, send.chunk, send.count
        width, apart = 1 if one_run else chunks.shape[2], False
    else:
        src, dst, first = singles(send)
        many, width, apart = np.ones_like(first), chunks.shape[2], True
    begins = chunks[:, first, :width]
    shape = begins.shape
    count = np.broadcast_to((many * (chunks.shape[2] if one_run else 1))[None, :, None], shape)
    whole_src = np.broadcast_to((groups[:, None] + src[None] * step)[:, :, None], shape)
    whole_dst = np.broadcast_to((groups[:, None] + dst[None] * step)[:, :, None], shape)
    sent = Send(whole_src.ravel(), whole_dst.ravel(), begins.ravel(), count.ravel(), send.reduce)
    return sent if one_run or not apart else runs(*singles(sent), send.reduce)


def _steps(chunks: Ints, axis: int) -> bool:
    """Whether the chunks are counted up by one along `axis`."""
    return bool(np.all(np.diff(chunks, axis=axis) == 1))
