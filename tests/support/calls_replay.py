"""Counter-examples of communicators replayed: ranks run one call at a time, and the claim is looked for.

Nothing of `check_calls` is used but which ranks are in a communicator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commplan.verify.programs.counterexample import Counterexample
from tests.support.calls import Call, Mesh, RankCalls


class Meeting(NamedTuple):
    """All ranks of a communicator have reached it: rank -> the index of its call, and the collective."""

    calls: dict[int, tuple[int, Call]]

    @property
    def agreed(self) -> bool:
        return len({call.agreed for _, call in self.calls.values()}) == 1


def execute_calls(sizes: Mapping[str, int], ranks: Sequence[RankCalls]) -> tuple[list[Meeting], list[int]]:
    """Every rendezvous, in a possible order; and the number of calls that each rank completes."""
    mesh, done = Mesh(sizes), [0] * len(ranks)
    entered = [-1] * len(ranks)
    meetings: dict[tuple[tuple[str, ...], tuple[int, ...]], dict[int, tuple[int, Call]]] = {}
    met: list[Meeting] = []
    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(ranks):
            if done[rank] == len(calls.calls) or entered[rank] == done[rank]:
                continue
            moved, entered[rank], call = True, done[rank], calls.calls[done[rank]]
            members = mesh.members(rank, call.axes)
            room = meetings.setdefault((call.axes, members), {})
            room[rank] = done[rank], call
            if len(room) < len(members):
                continue
            met.append(Meeting(meetings.pop((call.axes, members))))
            for member in members:
                done[member] += 1
    return met, done


def correct_calls(sizes: Mapping[str, int], ranks: Sequence[RankCalls]) -> bool:
    """Whether all ranks create the same communicators, meet in all their calls, and always agree."""
    met, done = execute_calls(sizes, ranks)
    ended = done == [len(each.calls) for each in ranks]
    return ended and all(each.agreed for each in met) and len({each.created for each in ranks}) == 1


def replay_calls(sizes: Mapping[str, int], ranks: Sequence[RankCalls], claim: Counterexample) -> bool:
    """Whether the situation described by `claim` really occurs."""
    if claim.failure == "creation":
        created = [ranks[rank].created[claim.rounds[0] : claim.rounds[0] + 1] for rank in claim.ranks]
        descriptions = [f"over {', '.join(groups[0])}" if groups else "none" for groups in created]
        return descriptions == [claim.expected, claim.found] and descriptions[0] != descriptions[1]
    met, done = execute_calls(sizes, ranks)
    who = dict(zip(claim.ranks, claim.rounds, strict=True))
    for meeting in met:
        places = {rank: at for rank, (at, _) in meeting.calls.items() if rank in who}
        if places == who and not meeting.agreed:
            descriptions = [str(meeting.calls[rank][1]) for rank in claim.ranks]
            return descriptions == [claim.expected, claim.found]
    waits = [done[rank] < len(ranks[rank].calls) for rank in claim.ranks]
    at = [done[rank] for rank in claim.ranks]
    if claim.found == "no further call":
        return waits == [True, False] and at == list(claim.rounds)
    return all(waits) and at == list(claim.rounds)
