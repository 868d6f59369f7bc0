"""Communicators: that all ranks of each create it, and call it, in the same order.

All ranks run one schedule, so each issues the same sequence, and ranks that issue the same sequence meet:
that is proved without looking at any single rank. Sequences that differ (of ranks that were compiled or
changed apart) are run against each other: a call completes when all ranks of its communicator are there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from commplan.diagnostics import Note, Span
from commplan.ir.axes import coordinates, group
from commplan.ir.schedule import Collective, Phase, Schedule
from commplan.verify.programs.counterexample import Counterexample


class Call(msgspec.Struct, frozen=True, gc=False):
    """One collective as a rank issues it, over its communicator along `axes`."""

    phase: str
    axes: tuple[str, ...]
    kind: str
    dtype: str
    nbytes: int
    op: str | None
    root: int | None
    algorithm: str
    span: Span

    @property
    def agreed(self) -> tuple[object, ...]:
        """The properties that must agree on all ranks of a call."""
        return (self.axes, self.kind, self.dtype, self.nbytes, self.op, self.root, self.algorithm)

    def __str__(self) -> str:
        root = "" if self.root is None else f" from {self.root}"
        return (
            f"{self.kind}{root} of {self.nbytes} bytes ({self.dtype}) over {', '.join(self.axes)}"
            f" via {self.algorithm} (line {self.span.line})"
        )


class RankCalls(msgspec.Struct, frozen=True):
    """One rank's use of communicators: it creates them, with their axes, then calls them."""

    created: tuple[tuple[str, ...], ...]
    calls: tuple[Call, ...]


def communicators(phases: Sequence[Phase]) -> tuple[tuple[str, ...], ...]:
    """The groups of axes of collectives, in the order of first use, which is the order of creation on all
    ranks."""
    used = (op.axes for phase in phases for op in phase.ops if isinstance(op, Collective))
    return tuple(dict.fromkeys(used))


def calls_of(schedule: Schedule) -> RankCalls:
    """The sequence that every rank of `schedule` issues: each phase once, in plan order."""
    return RankCalls(
        communicators(schedule.phases),
        tuple(
            Call(
                phase.name, op.axes, op.kind, str(op.dtype), op.nbytes, op.op, op.root, str(op.algorithm),
                op.span,
            )
            for phase in schedule.phases
            for op in phase.ops
            if isinstance(op, Collective)
        ),
    )  # fmt: skip


def check_calls(sizes: Mapping[str, int], ranks: RankCalls | Sequence[RankCalls]) -> Counterexample | None:
    """Why ranks on a mesh of `sizes` do not meet in all their calls; None: they do.

    ranks: one sequence that all issue, or one for each rank, ranks counted row-major over the axes.
    """
    if isinstance(ranks, RankCalls) or len(set(ranks)) == 1:
        # By induction over the calls: all are at the same call, hence all ranks of its communicator.
        return None
    return _created(ranks) or _run(sizes, ranks)


def _created(ranks: Sequence[RankCalls]) -> Counterexample | None:
    """Creating a communicator is a call of all ranks: the n-th must be the same on all."""
    for number, groups in enumerate(itertools.zip_longest(*(calls.created for calls in ranks))):
        other = next((rank for rank, group in enumerate(groups) if group != groups[0]), None)
        if other is None:
            continue
        descriptions = [
            f"over {', '.join(group)}" if group else "none" for group in (groups[0], groups[other])
        ]
        span, notes = _lines(ranks, (0, other), groups[0], groups[other])
        return Counterexample(
            "creation", (0, other), (number, number), None, descriptions[0], descriptions[1],
            f"the communicator that ranks create as number {number} is one {descriptions[0]} on rank 0 and"
            f" {descriptions[1]} on rank {other}: creating them never ends, or mixes them up",
            span, notes,
        )  # fmt: skip
    return None


def _lines(
    ranks: Sequence[RankCalls], which: tuple[int, int], *groups: tuple[str, ...] | None
) -> tuple[Span | None, tuple[Note, ...]]:
    """The plan lines that first need the communicators over `groups`."""
    lines: list[tuple[int, Span]] = []
    for rank, creations in zip(which, groups, strict=True):
        span = next((call.span for call in ranks[rank].calls if call.axes == creations), None)
        if span is not None:
            lines.append((rank, span))
    if not lines:
        return None, ()
    return lines[0][1], tuple(Note(f"what rank {rank} creates it for", span) for rank, span in lines[1:])


class Mesh:
    """Which ranks are in one communicator."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.ranks = math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        return coordinates(rank, self.sizes, self.sizes)

    def members(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of the communicator along `axes` that `rank` is in."""
        along = [axis for axis in self.sizes if axis in axes]
        return group(self.coordinates(rank), along, self.sizes)


def _run(sizes: Mapping[str, int], ranks: Sequence[RankCalls]) -> Counterexample | None:
    """Let every rank go from call to call; in each its whole communicator must meet."""
    mesh = Mesh(sizes)
    at = [0] * len(ranks)
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        if at[rank] == len(ranks[rank].calls):
            continue
        call = ranks[rank].calls[at[rank]]
        members = mesh.members(rank, call.axes)
        calls = [_current(ranks, at, peer) for peer in members]
        if any(other is None or other.axes != call.axes for other in calls):
            continue  # not all have arrived yet; the last one releases all
        for member, other in zip(members, calls, strict=True):
            if other is not None and other.agreed != call.agreed:
                return _unlike(ranks, at, rank, member)
        for member in members:
            at[member] += 1
        ready.extend(members)
    stuck = [rank for rank in range(len(ranks)) if at[rank] < len(ranks[rank].calls)]
    return _stuck(mesh, ranks, at, stuck[0]) if stuck else None


def _current(ranks: Sequence[RankCalls], at: list[int], rank: int) -> Call | None:
    return ranks[rank].calls[at[rank]] if at[rank] < len(ranks[rank].calls) else None


def _unlike(ranks: Sequence[RankCalls], at: list[int], rank: int, other: int) -> Counterexample:
    first, second = ranks[rank].calls[at[rank]], ranks[other].calls[at[other]]
    return Counterexample(
        "calls", (rank, other), (at[rank], at[other]), None, str(first), str(second),
        f"in call {at[rank]} of rank {rank} it issues {first}, and rank {other} meets it with {second}",
        first.span, (Note(f"what rank {other} issues", second.span),),
    )  # fmt: skip


def _stuck(mesh: Mesh, ranks: Sequence[RankCalls], at: list[int], rank: int) -> Counterexample:
    """Follow the waits to a cycle or to a rank without further calls."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        call = ranks[rank].calls[at[rank]]
        away = next(member for member in mesh.members(rank, call.axes) if _elsewhere(ranks, at, member, call))
        if _current(ranks, at, away) is None:
            return Counterexample(
                "calls", (rank, away), (at[rank], at[away]), None, str(call), "no further call",
                f"rank {rank} waits forever in {call}: rank {away} has no call left that would meet it",
                call.span,
            )  # fmt: skip
        rank = away
    circle = path[path.index(rank) :]
    calls = [ranks[member].calls[at[member]] for member in circle]
    sentences = [f"rank {member} waits in {call}" for member, call in zip(circle, calls, strict=True)]
    successors = zip(circle[1:], calls[1:], strict=True)
    return Counterexample(
        "calls", tuple(circle), tuple(at[member] for member in circle), None, "every rank gets to its end",
        f"a circle of {len(circle)} ranks",
        f"ranks {', '.join(map(str, circle))} wait for each other in a circle:\n" + "\n".join(sentences),
        calls[0].span,
        tuple(Note(f"where rank {member} waits", call.span) for member, call in successors),
    )  # fmt: skip


def _elsewhere(ranks: Sequence[RankCalls], at: list[int], rank: int, call: Call) -> bool:
    current = _current(ranks, at, rank)
    return current is None or current.axes != call.axes
