"""Finds the rank that blocks the others of a job while it runs, from the records of its processes.

The observer reads the `Live` block of each record, which needs no lock of a process. If a rank has waited
for longer than its bound, it reads whole records and calls `recorder.verdict.blame`. It asks the sidecars of
other hosts for the states of their ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Protocol

from commplan import io
from commplan.diagnostics import CommplanError
from commplan.recorder import file, live
from commplan.recorder.blame import ANSWER, Rank, ranks_along, ranks_of, states_of
from commplan.recorder.file import BEGIN, Record
from commplan.recorder.live import Live
from commplan.recorder.processes import identity, process_state, silence
from commplan.recorder.stacks import main_stack
from commplan.recorder.verdict import (
    FIRST,
    Condition,
    Need,
    Patience,
    RankState,
    Verdict,
    Wait,
    blame,
    described,
    usual_s,
)
from commplan.sidecar.mail import Address, SidecarMessage

_GRACE_S = 2.0  # after the death of a process
_ANSWER_S = 1.5  # for other sidecars to answer
_AGAIN_S, _LONGEST_S = 1.0, 5.0  # between two evaluations; while ranks are busy
_CONFIRM_S = 0.5  # between the two evaluations that must agree
_STACK_S = 1.5  # for a process to answer with its stack
_SETTLE_S = 0.2  # in which all ranks receive a verdict, before it applies
_LOST_S = 30.0  # for the sidecar of another host to be heard
_LEFT = "left"  # a sequence that a rank begins when it leaves
_COMPARISON, _SEQUENCE = "the comparison of a step", "comparison {}"  # a wait; its sequence for a group
_HELD = "it holds the interpreter's lock"
_CONDITIONS: Mapping[str, Condition] = {
    "dead": "dead",
    "stopped": "stopped",
    "stuck in the kernel": "stuck in the kernel",
}


class AttendedProcess(Protocol):
    """A process that the sidecar attends.

    Attributes:
        seconds: When it ended; 0 before.
        stack: The Python of its main thread when it last answered.
        asked: The time of the first query that it has not answered, on `time.monotonic`; 0 if there is none.
    """

    number: int
    seconds: float
    stack: str
    asked: float

    def ask_stack(self) -> None: ...

    def say(self, text: str) -> None: ...


class OpenRecord:
    """An open record.

    Raises:
        OSError: If it cannot be opened.
        CommplanError: CP1114 if it is damaged.
    """

    def __init__(self, path: Path, process: AttendedProcess) -> None:
        self.path, self.process = path, process
        self.descriptor = io.open_file(path, os.O_RDWR | os.O_NOFOLLOW)
        self.rank = self.record().rank
        self.live = live.read_live(self.descriptor)

    def record(self) -> Record:
        return file.read_open(self.path, self.descriptor)

    @property
    def condition(self) -> str:
        """See `recorder.processes.process_state`."""
        return "dead" if self.process.seconds else process_state(self.process.number)


class Job:
    """The processes of a job on this host.

    Args:
        send: Sends a message to the sidecars of other hosts.
        address: The address of this sidecar.
    """

    def __init__(
        self, name: str, send: Callable[[SidecarMessage, Sequence[Address]], None], address: Address
    ) -> None:
        self.name, self._send, self._address = name, send, address
        self.records: list[OpenRecord] = []
        self.addresses: dict[int, Address] = {}  # by rank of another host: the sidecar of that host
        self._heard: set[Address] = set()
        self._began, self._greeted = time.monotonic(), 0.0
        self._asked: float | None = None
        self._serial, self._again, self._is_judged = 0, 0.0, False
        self._answers: dict[int, RankState] = {}
        self._suspected: object = None  # the result of the last evaluation
        self._noticed: object = None  # the wait about which a message was printed

    def add(self, path: Path, process: AttendedProcess) -> None:
        with contextlib.suppress(CommplanError, OSError, struct.error):
            self.records.append(OpenRecord(path, process))

    def add_hosts(self, hosts: Mapping[tuple[int, ...], Address]) -> None:
        self.addresses |= {rank: address for ranks, address in hosts.items() for rank in ranks}

    def remove(self, path: Path) -> None:
        for each in [each for each in self.records if each.path == path]:
            self.records.remove(each)
            os.close(each.descriptor)

    def close(self) -> None:
        for each in self.records:
            os.close(each.descriptor)

    # The loop of the sidecar calls these.

    def look(self, now: float) -> None:
        """Evaluate the job if a rank waits for too long."""
        self._greet_unheard(now)
        for each in self.records:
            each.live = live.read_live(each.descriptor)
        bound = max((each.live.bound_ns for each in self.records), default=0) * 1e-9
        alarmed = self._alarmed(bound, now)
        if not alarmed or self._is_judged:
            self._asked = self._suspected = None
        elif self._asked is not None:
            if now > self._asked + _ANSWER_S or self._answers.keys() >= self._known():
                self._asked = None
                self._evaluate(alarmed, bound, now)
        elif now >= self._again:
            self._asked, self._serial = now, self._serial + 1
            self._answers.clear()
            self._tell("ask", serial=self._serial)
            if not self._heard:
                self.look(now)

    def take(self, message: SidecarMessage) -> None:
        """Take a message of another host's sidecar."""
        if message.sender not in self.addresses:
            return
        now, address = time.monotonic(), self.addresses[message.sender]
        if message.kind == "hello" and message.address is not None:
            replaced, address = address, message.address
            self._heard.discard(replaced)
            self.addresses |= {n: address for n, each in self.addresses.items() if each == replaced}
            if not message.is_reply:
                self._greet([address], is_reply=True)
        self._heard.add(address)
        if message.kind == "ask":
            for each in self.records:
                each.live = live.read_live(each.descriptor)
            for state in self._states(self._all_records(), now).values():
                answer = SidecarMessage(self.name, "answer", self._lowest, message.serial, state)
                self._send(answer, [address])
        elif message.kind == "answer" and message.serial == self._serial and message.state is not None:
            self._answers[message.state.rank] = message.state
        elif message.kind == "verdict" and not self._is_judged:
            self._write(message.text, message.line, now, abandoned=message.abandoned)

    @property
    def _lowest(self) -> int:
        return min(each.rank for each in self.records)

    def _known(self) -> set[int]:
        """The ranks of other hosts whose sidecars were heard."""
        return {rank for rank, address in self.addresses.items() if address in self._heard}

    def _tell(self, kind: str, **content: object) -> None:
        if self.addresses:
            message = SidecarMessage(self.name, kind, self._lowest, **content)  # pyright: ignore[reportArgumentType]
            self._send(message, list({*self.addresses.values()}))

    def _greet(self, addresses: Sequence[Address], *, is_reply: bool = False) -> None:
        hello = SidecarMessage(self.name, "hello", self._lowest, address=self._address, is_reply=is_reply)
        self._send(hello, addresses)

    def _greet_unheard(self, now: float) -> None:
        """Find out which sidecars of other hosts can be reached, and report those that cannot."""
        unheard = {*self.addresses.values()} - self._heard
        if not unheard or now < self._greeted + _GRACE_S or self._greeted > self._began + _LOST_S:
            return
        self._greeted = now
        self._greet(list(unheard))
        if now > self._began + _LOST_S:
            text = f"commplan: no datagrams from {', '.join(sorted({each.host for each in unheard}))}"
            self.records[0].process.say(f"{text}: ranks there that block others are not reported\n")

    # The decision.

    def _alarmed(self, bound: float, now: float) -> list[OpenRecord]:
        """The records of ranks that wait for longer than the bound.

        Two seconds suffice after a death, and for a comparison if a rank has ended its program.
        """
        has_died = any(each.process.seconds for each in self.records)
        has_ended = any(each.live.left for each in self.records)
        soon = min(_GRACE_S, bound)
        return [
            each
            for each in self.records
            if _waited_s(each.live, now) > (soon if has_died or (has_ended and each.live.compares) else bound)
        ]

    def _all_records(self) -> dict[OpenRecord, Record]:
        records: dict[OpenRecord, Record] = {}
        for each in self.records:
            with contextlib.suppress(CommplanError, OSError):
                records[each] = each.record()
        return records

    def _states(self, records: Mapping[OpenRecord, Record], now: float) -> dict[int, RankState]:
        """The states of the ranks on this host."""
        ranks = {rank.rank: rank for rank in ranks_of(list(records.values()))}
        clock = min((record.clock for record in records.values()), default=0.0)
        grid = max((record.ranks for record in records.values() if not record.lane), default=0)
        states = states_of(list(ranks.values()), now + clock, {}, range(grid))
        for number, state in states.items():
            of_rank = [each for each in records if each.rank == number]
            states[number] = self._live_state(state, ranks[number], of_rank, now)
        return states

    def _live_state(
        self, state: RankState, rank: Rank, records: Sequence[OpenRecord], now: float
    ) -> RankState:
        lives, process = [each.live for each in records], records[0].process
        idle_s = now - max(max(each.moved, each.compares) for each in lives) * 1e-9
        server = next((each for each in lives if each.served), None)
        waits = state.waits if any(each.waits for each in lives) else ()
        begun = dict(state.begun)
        if server is not None:
            waits = state.waits if server.serves and server.flags and not server.is_patient else ()
            begun |= {ANSWER: 1} if server.serves and not server.is_patient else {}
        how, name = records[0].condition, f"process {process.number} on {rank.host}"
        condition = _CONDITIONS.get(how, "alive")
        notes = () if condition == "alive" else (identity("rank", rank.rank, process.number, rank.host, how),)
        if not waits and all(each.left for each in lives):
            condition = "ended"
        if server is not None or all(each.left == live.LEFT for each in lives):
            begun |= {_LEFT: 1}  # workers do not wait for servers at their end
        state = state._replace(
            condition=condition,
            how=silence(how, rank.host) if notes else "",
            notes=notes,
            waits=waits,
            begun=begun,
            idle_s=idle_s,
            is_excused=any(each.late or each.is_patient for each in lives),
            process=name,
            last=rank.last.name if rank.last else "",
            runs=rank.last.runs if rank.last else 0,
            stack="" if waits else process.stack,
        )
        if _has_stack(state) and idle_s > _CONFIRM_S:
            process.ask_stack()
        for each in (each for each in lives if each.comparison):
            begun[_SEQUENCE.format(each.group)] = each.comparison
            state = state._replace(waits=(*state.waits, *_comparison(rank, each, now)))
        return state

    def _silent(self) -> dict[int, RankState]:
        """The states of the ranks of hosts whose sidecars do not answer."""
        return {
            rank: RankState(rank, "silent", silence("unknown", self.addresses[rank].host))
            for rank in sorted(self._known() - self._answers.keys())
        }

    def _evaluate(self, alarmed: Sequence[OpenRecord], bound: float, now: float) -> None:
        records = self._all_records()
        states = self._states(records, now) | self._answers | self._silent()
        # Records of many ranks take long to read.
        self._again = max(now + _AGAIN_S, now + 10 * (time.monotonic() - now))
        waiting = [each for each in alarmed if each in records and states[each.rank].waits]
        if not waiting:
            self._part([each for each in alarmed if each in records], records, states, bound, now)
            return
        source = _source(waiting, states)
        waiter, ends, compares = source.rank, bool(source.live.ends), source.live.is_comparing
        if not compares:  # a rank that compares a step may still execute an earlier one
            states = {rank: _without_comparison(state) for rank, state in states.items()}
        usual = bound if compares else _usual_s(records[source], source.live.waits, bound)
        busy_s = max(each.live.busy_ns for each in self.records) * 1e-9
        late_s = inf if compares else max(usual, busy_s)
        verdict = blame(states, waiter, Patience(bound, late_s, bound))
        is_known = len(states) >= records[source].ranks
        has_ended = any(states[rank].condition == "ended" for rank in verdict.reasons)
        is_over = has_ended and not compares  # the engine reports it
        is_still = min((states[rank].idle_s for rank in verdict.waiting), default=0.0) >= bound
        if is_over or verdict.kind == "none" or not (is_known or verdict.kind == "down"):
            return
        if verdict.kind in ("stalled", "behind", "circle") and (compares or not is_still):
            return
        if not self._is_confirmed(verdict, now):
            return
        late = [each for each in self.records if each.rank in verdict.reasons]
        silent = [each for each in late if _has_stack(states[each.rank]) and not states[each.rank].stack]
        if any(each.process.asked and now < each.process.asked + _STACK_S for each in silent):
            self._again = now + _CONFIRM_S
            return
        states |= self._stacks(silent, states)
        text, line = described(verdict, states, "rank", waiter), states[waiter].waits[0].where
        if verdict.kind == "busy":
            is_excused = any(states[rank].is_excused for rank in verdict.reasons)
            if states[waiter].idle_s >= usual and not is_excused:
                excuse = _TIMEOUT if compares else f"it ends after {late_s:.0f} s: {_EXCUSE}" if ends else ""
                limit = f"\nnote: {excuse}" if excuse else ""
                self._print(f"{text}\nnote: {line} waits for it{limit}", source, verdict)
                self._again = now + min(_LONGEST_S, max(_CONFIRM_S, late_s - states[waiter].idle_s))
            return
        if verdict.kind == "late" and ends:
            text += f"\nnote: the limit is {late_s:.0f} s: {_EXCUSE}"
        if ends:
            self._judge(text, line, now, abandoned=False)
        else:
            self._print(f"{text}\nnote: {line} waits for it", source, verdict)

    def _is_confirmed(self, verdict: Verdict, now: float) -> bool:
        """Whether the last evaluation had the same result."""
        result = verdict.kind, tuple(verdict.reasons), verdict.waiting
        is_same, self._suspected = result == self._suspected, result
        if not is_same:
            self._again = now + _CONFIRM_S
        return is_same

    def _stacks(self, silent: Sequence[OpenRecord], states: Mapping[int, RankState]) -> dict[int, RankState]:
        """The states of ranks that do not answer, with their Python if a signal shows it."""
        explained: dict[int, RankState] = {}
        for each in silent:
            stack = main_stack(each.path)
            explained[each.rank] = states[each.rank]._replace(stack=f"{stack}; {_HELD}" if stack else _HELD)
        return explained

    def _print(self, text: str, source: OpenRecord, verdict: Verdict) -> None:
        """Print `text` once for each wait, on the first rank that waits."""
        wait = source.live.waits or source.live.compares
        first = next((each for each in self.records if each.rank == min(verdict.waiting)), None)
        if self._noticed != wait and first is not None:
            self._noticed = wait
            first.process.say(f"commplan: {text}\n")

    def _part(
        self,
        alarmed: Sequence[OpenRecord],
        records: Mapping[OpenRecord, Record],
        states: Mapping[int, RankState],
        bound: float,
        now: float,
    ) -> None:
        """Decide whether the ranks that a rank waits for at its end are dead.

        A rank that is alive may still have work to do.
        """
        source = next((each for each in alarmed if each.live.parting), None)
        if source is None or len(states) < records[source].ranks:
            return
        waiter = source.rank
        remaining = [rank for rank in sorted(states) if _LEFT not in states[rank].begun and rank != waiter]
        down = {rank: states[rank].how for rank in remaining if states[rank].how}
        states = {rank: state._replace(condition="silent") for rank, state in states.items()}
        verdict = Verdict("down" if len(down) == len(remaining) else "busy", down)
        if not remaining or not self._is_confirmed(verdict, now):
            return
        if verdict.kind == "down":
            first, *notes = described(verdict, states, "rank", waiter).splitlines()
            text = "\n".join([f"{first}, and all others have ended", *notes])
            if source.live.ends:
                self._judge(text, "", now, abandoned=True)
            elif self._noticed != text:
                self._noticed = text
                source.process.say(f"commplan: {text}\n")
            return
        late = next((rank for rank in remaining if rank not in down and not states[rank].waits), None)
        has_waited = now - source.live.parting * 1e-9 > FIRST * bound
        if late is not None and has_waited and not source.live.served and self._noticed != "parting":
            self._noticed = "parting"
            _, *notes = described(Verdict("busy", {late: ""}), states, "rank", waiter).splitlines()
            text = f"this process has ended and waits for rank {late}"
            source.process.say("\n".join([f"commplan: {text}", *notes, ""]))

    def _judge(self, text: str, line: str, now: float, *, abandoned: bool) -> None:
        self._write(text, line, now, abandoned=abandoned)
        self._tell("verdict", text=text, line=line, abandoned=abandoned)

    def _write(self, text: str, line: str, now: float, *, abandoned: bool) -> None:
        self._is_judged = True
        for each in self.records:
            with contextlib.suppress(OSError):
                live.write_verdict(each.descriptor, text, line, now + _SETTLE_S, abandoned=abandoned)


_TIMEOUT = "run.jit(step, timeout=SECONDS) bounds the wait"
_EXCUSE = "put longer work into `with run.late():`, or bind(.., busy_s=SECONDS) waits longer"


def _has_stack(state: RankState) -> bool:
    """Whether messages about a rank show its Python."""
    return state.condition == "alive" and not state.waits


def _comparison(rank: Rank, state: Live, now: float) -> tuple[Wait, ...]:
    """The wait of a rank for others to compare a step, if it waits for them."""
    if not state.compares:
        return ()
    axes = [axis for place, axis in enumerate(rank.axes) if state.group >> place & 1]
    sequence, number = _SEQUENCE.format(state.group), state.comparison
    needs = tuple(Need(other, sequence, number) for other in ranks_along(rank, axes))
    return (Wait(_COMPARISON, now - state.compares * 1e-9, needs, "come to it"),)


def _source(waiting: Sequence[OpenRecord], states: Mapping[int, RankState]) -> OpenRecord:
    """The rank whose wait is evaluated: the oldest collective, or a comparison that cannot end."""
    oldest = sorted(waiting, key=lambda each: max(each.live.waits or each.live.compares, each.live.moved))
    comparison = next((each for each in oldest if each.live.is_comparing), None)
    if comparison is not None and blame(states, comparison.rank).kind == "down":
        return comparison
    return next((each for each in oldest if not each.live.is_comparing), oldest[0])


def _without_comparison(state: RankState) -> RankState:
    return state._replace(waits=tuple(wait for wait in state.waits if wait.where != _COMPARISON))


def _waited_s(state: Live, now: float) -> float:
    """Seconds for which a rank has waited without progress; 0 if it does not wait or is not watched."""
    since = state.parting or (max(state.waits, state.moved) if state.waits else state.compares)
    return now - since * 1e-9 if since and state.bound_ns else 0.0


def _usual_s(record: Record, since_ns: int, bound: float) -> float:
    """See `recorder.verdict.usual_s`, for the operation that began at `since_ns`."""
    since = since_ns * 1e-9 + record.clock
    begun = [event for event in record.events if event.kind == BEGIN]
    if not begun:
        return bound
    oldest = min(begun, key=lambda event: abs(event.seconds - since))
    times = [event.seconds for event in begun if event.name == oldest.name and event.runs <= oldest.runs]
    intervals = [after - before for before, after in itertools.pairwise(times)]
    return usual_s(oldest.runs, intervals[::-1], bound)


class Observer:
    """The jobs of all processes that the sidecar attends."""

    def __init__(self, send: Callable[[SidecarMessage, Sequence[Address]], None], address: Address) -> None:
        self.jobs: dict[str, Job] = {}
        self._send, self._address = send, address

    def add(self, name: str, path: Path, process: AttendedProcess) -> None:
        self.jobs.setdefault(name, Job(name, self._send, self._address)).add(path, process)

    def look(self) -> None:
        for job in self.jobs.values():
            # A file that a user damages must not end the sidecar.
            with contextlib.suppress(CommplanError, OSError, struct.error):
                job.look(time.monotonic())

    def take(self, messages: Iterable[SidecarMessage]) -> None:
        for message in messages:
            with contextlib.suppress(CommplanError, OSError, struct.error):
                if message.job in self.jobs:
                    self.jobs[message.job].take(message)

    def add_hosts(self, name: str, hosts: Mapping[tuple[int, ...], Address]) -> None:
        """Add the sidecars of other hosts to a job, by their ranks."""
        if name in self.jobs:
            self.jobs[name].add_hosts(hosts)

    def remove(self, path: Path) -> None:
        """Close a record to which its process no longer writes."""
        for job in self.jobs.values():
            job.remove(path)

    def drop(self, running: Sequence[AttendedProcess]) -> None:
        """Close the records of jobs without running processes."""
        for name, job in list(self.jobs.items()):
            if not any(each.process in running for each in job.records):
                self.jobs.pop(name).close()
