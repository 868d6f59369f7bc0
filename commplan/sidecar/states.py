"""The states of the ranks on this host, from their records while their processes run.

`OpenRecord` is a record that the sidecar watches. `states_here` translates records, their live blocks and the
states of their processes to the `RankState` of each rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from commplan import io
from commplan.diagnostics import CommplanError
from commplan.recorder import live
from commplan.recorder.blame import ANSWER, Rank, ranks_along, ranks_of, sequence_of, states_of
from commplan.recorder.file import BEGIN, Record
from commplan.recorder.live import Live
from commplan.recorder.processes import identity, process_state, silence
from commplan.recorder.rank_state import STUCK, Comparison, Condition, Joint, Need, RankState, Wait
from commplan.recorder.reading import read_open
from commplan.recorder.verdict import usual_s
from commplan.sidecar.process import AttendedProcess

LEFT = "left"  # the sequence of `RankState.begun` that a rank begins when it leaves
COMPARISON = "the comparison of a step"  # the `Wait.where` of a wait for a comparison
_STACK_AFTER_S = 0.5  # seconds without progress after which a process is asked for its stack
_ABORTED = "was aborted by its runtime: its own output says why"


class OpenRecord:
    """A record that the sidecar keeps open: its process may remove the file.

    Attributes:
        path: The file.
        process: The process that writes it.
        members: The processes that run the recorded steps together; empty if no whole steps are recorded.
        descriptor: The open file.
        rank: The rank that writes it.
        group: All ranks of the job, as far as this record shows them.
        live: Its live block when it was last read, see `ProcessTable.refresh`.

    Args:
        descriptor: The open file, which this object closes if it cannot be read; -1 to open `path`.

    Raises:
        OSError: If it cannot be opened or read.
        CommplanError: CP1114 if it is damaged.
        struct.error: If it is too short for a live block.
    """

    def __init__(
        self, path: Path, process: AttendedProcess, members: tuple[int, ...] = (), descriptor: int = -1
    ) -> None:
        self.path, self.process, self.members = path, process, members
        opened = descriptor if descriptor >= 0 else io.open_file(path, os.O_RDWR | os.O_NOFOLLOW)
        self.descriptor = opened
        try:
            record = self.record()
        except (CommplanError, OSError):
            os.close(opened)
            raise
        self.rank = record.rank
        self.group: Sequence[int] = members or range(record.ranks)
        self.live = live.read_live(self.descriptor)

    def record(self) -> Record:
        """Read the whole record. Raises OSError, and CommplanError CP1114 if it is damaged."""
        return read_open(self.path, self.descriptor)


def states_here(records: Mapping[OpenRecord, Record], noun: str, now: float) -> dict[int, RankState]:
    """The states of the ranks on this host, by rank.

    Args:
        records: The records of a job on this host.
        noun: The noun for a rank in messages.
        now: The `time.monotonic` at which the ages of operations are taken.
    """
    clock = min((record.clock for record in records.values()), default=0.0)
    states: dict[int, list[RankState]] = {}
    for members in dict.fromkeys(each.members for each in records):
        group_records = {each: record for each, record in records.items() if each.members == members}
        grid = max((record.ranks for record in group_records.values() if not record.lane), default=0)
        ranks = ranks_of(list(group_records.values()))
        recorded = states_of(ranks, now + clock, {}, members or range(grid))
        for rank in ranks:
            rank_records = {each: record for each, record in group_records.items() if each.rank == rank.rank}
            state = _live_state(recorded[rank.rank], rank, rank_records, noun, now)
            states.setdefault(rank.rank, []).append(state)
    return {rank: _merged(group_states) for rank, group_states in states.items()}


def _merged(states: Sequence[RankState]) -> RankState:
    """The state of a rank from its states in several groups of processes, with the longest wait first."""
    newest = min(states, key=lambda state: state.idle_s)
    if len(states) == 1:
        return newest
    waits = sorted((wait for state in states for wait in state.waits), key=lambda wait: wait.seconds)
    begun, joint = dict[str, int](), dict[str, Joint]()
    recent: dict[str, tuple[int, tuple[str, ...]]] = {}
    for state in states:
        begun |= state.begun
        joint |= state.joint
        recent |= state.recent
    return newest._replace(waits=tuple(waits[::-1]), begun=begun, recent=recent, joint=joint)


def _live_state(
    state: RankState, rank: Rank, records: Mapping[OpenRecord, Record], noun: str, now: float
) -> RankState:
    """The state of a rank whose process is on this host.

    Args:
        state: The state according to the events of its records.
        rank: The progress of the rank, from which `state` was made.
        records: The records of the rank in a group of processes, at least one.
        noun: The noun for a rank in messages.
        now: The time on `time.monotonic`.
    """
    lives, first = [each.live for each in records], next(iter(records))
    process = first.process
    condition: Condition = "dead" if process.seconds else process_state(process.number)
    idle_s = now - max(max(each.moved, each.compares) for each in lives) * 1e-9
    server = next((each for each in lives if each.served), None)
    is_frozen = condition in ("alive", STUCK) and any(each.is_frozen for each in lives)
    waits = state.waits if any(each.waits for each in lives) and not is_frozen else ()

    # Comparisons of steps, and requests that a server has not answered.
    begun = dict(state.begun)
    joint: dict[str, Joint] = {}
    for each, record in records.items():
        if number := each.live.comparison:
            axes = [axis for place, axis in enumerate(rank.axes) if each.live.group >> place & 1]
            peers = each.members or ranks_along(rank, axes)  # the ranks that compare steps with this one
            sequence = f"comparison {sequence_of(peers)}"
            begun[sequence], joint[sequence] = number, _joint(each.live, record, now)
            if waits_s := joint[sequence].waits_s:
                waits += (Wait(COMPARISON, waits_s, (Need.begin(peers, sequence, number),), "reached it"),)
    if server is not None:
        waits = state.waits if server.serves and server.flags and not server.is_patient else ()
        begun |= {ANSWER: 1} if server.serves and not server.is_patient else {}

    # The condition and its message.
    name = f"process {process.number} on {rank.host}"
    how = silence(condition, rank.host)
    notes = (identity(noun, rank.rank, process.number, rank.host, condition),)
    if not waits and all(each.left for each in lives) and condition != "stopped":
        condition = "ended"
        how = next(iter(records.values())).ended.removeprefix("has ended").removeprefix(" with ")
    elif condition in ("alive", STUCK) and any(each.is_aborted for each in lives):
        condition, how = "aborted", _ABORTED
    state = state._replace(condition=condition, process=name, last=rank.last.name if rank.last else "")
    state = state._replace(runs=rank.last.runs if rank.last else 0)
    if condition in ("ended", "aborted"):
        notes = (f"{noun} {rank.rank} ({name}){state.finished.removeprefix('; it')}",) if state.last else ()
    if server is not None or all(each.left == live.LEFT for each in lives):
        begun |= {LEFT: 1}  # workers do not wait for servers at their end

    state = state._replace(
        how="" if condition == "alive" else how,
        notes=() if condition == "alive" else notes,
        waits=waits,
        begun=begun,
        idle_s=idle_s,
        is_excused=any(each.late or each.is_patient for each in lives),
        stack=process.stack,
        joint=joint,
    )
    if condition == "alive" and idle_s > _STACK_AFTER_S:
        process.request_stack()
    return state


def _joint(state: Live, record: Record, now: float) -> Joint:
    """The progress of a rank in steps that ranks compare, from a record and its live block."""
    comparison = Comparison("", "")
    if record.call is not None:
        with contextlib.suppress(TypeError):  # the process is writing it
            comparison = Comparison.read(record.call.text)
    waits_s = now - state.compares * 1e-9 if state.compares else 0.0
    is_running = not (state.is_ahead or state.compares or state.is_frozen)
    return Joint(state.comparison, is_running, waits_s, comparison)


def waited_s(state: Live, now: float) -> float:
    """Seconds for which a rank has waited without progress; 0 if it does not wait or is not watched.

    Args:
        state: The live block of the rank's record.
        now: The time on `time.monotonic`.
    """
    since = state.parting or (max(state.waits, state.moved) if state.waits else state.compares)
    return now - since * 1e-9 if since and state.bound_ns else 0.0


def usual_wait_s(record: Record, since_ns: int, bound: float) -> float:
    """Seconds after which the wait for an operation counts as slow, see `recorder.verdict.usual_s`.

    Args:
        record: The record with the operation.
        since_ns: When the operation began, on `time.monotonic_ns`.
        bound: The minimum in seconds. Returned if the record has no operations.
    """
    since_s = since_ns * 1e-9 + record.clock
    begins = [event for event in record.events if event.kind == BEGIN]
    if not begins:
        return bound
    operation = min(begins, key=lambda event: abs(event.seconds - since_s))
    times = [
        event.seconds for event in begins if event.name == operation.name and event.runs <= operation.runs
    ]
    intervals = [after - before for before, after in itertools.pairwise(times)]
    return usual_s(operation.runs, intervals[::-1], bound)
