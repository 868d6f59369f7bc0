"""Finds the rank that blocks the others of a job while it runs, from the records of its processes.

The observer reads the `Live` block of each record, which needs no lock of a process. If a rank has waited
for longer than its bound, it reads whole records and calls `recorder.verdict.blame`. It asks the sidecars of
other hosts for the states of their ranks.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from commplan.diagnostics import CommplanError
from commplan.recorder import live
from commplan.recorder.file import Record
from commplan.recorder.processes import silence
from commplan.recorder.rank_state import RankState
from commplan.recorder.stacks import main_stack
from commplan.recorder.verdict import FIRST, Patience, Verdict, blame, described, is_down, listed
from commplan.sidecar.mail import Address, SidecarMessage
from commplan.sidecar.states import (
    COMPARISON,
    LEFT,
    AttendedProcess,
    OpenRecord,
    has_stack,
    states_here,
    usual_wait_s,
    waited_s,
)

_GRACE_S = 2.0  # after the death of a process
_ENDED_S = 1.0  # after the end of a program, and for a comparison
_ANSWER_S, _REPEAT_S = 1.5, 0.5  # for other sidecars to answer, at least; until they are asked again
_READINGS = 4  # for other sidecars to answer: times the duration of reading the records here
_AGAIN_S, _LONGEST_S = 1.0, 5.0  # between two evaluations, at least and at most
_CONFIRM_S = 0.5  # between the two evaluations that must agree
_STACK_S = 1.5  # for a process to answer with its stack
_SETTLE_S = 0.2  # in which all ranks receive a verdict, before it applies
_LOST_S = 30.0  # for the sidecar of another host to be heard
_HELD = "it holds the interpreter's lock"
_REASONS = ("down", "order", "late", "circle")  # kinds of verdicts that name ranks


Send = Callable[[SidecarMessage, Sequence[Address]], None]


class Job:
    """The processes of a job on this host.

    Args:
        send: Sends a message to the sidecars of other hosts.
        address: The address of this sidecar.
        who: The noun for a rank in messages: `process` if whole steps are recorded.
    """

    def __init__(self, name: str, send: Send, address: Address, who: str = "rank") -> None:
        self.name, self._send, self._address, self._who = name, send, address, who
        self.records: list[OpenRecord] = []
        self.addresses: dict[int, Address] = {}  # by rank of another host: the sidecar of that host
        self._heard: set[Address] = set()
        self._ended: set[int] = set()  # ranks here that have died, or whose program has ended
        self._is_warned = False  # there are such ranks on other hosts
        self._began, self._greeted = time.monotonic(), 0.0
        self._queried_at: float | None = None
        self._asked_at = 0.0
        self._serial, self._again, self._is_judged = 0, 0.0, False
        self._answers: dict[int, RankState] = {}
        self._sent: set[Address] = set()  # the sidecars that have sent anything since the query
        self._reading_s = 0.0  # the duration of the last reading of all records
        self._suspected: object = None  # the result of the last evaluation
        self._noticed: object = None  # the wait about which a message was printed
        self._stated_at, self._states = -1.0, dict[int, RankState]()  # the last answer to other sidecars

    @property
    def ranks(self) -> set[int]:
        """All ranks of the job."""
        return {rank for each in self.records for rank in each.group}

    def add(
        self, path: Path, process: AttendedProcess, members: tuple[int, ...] = (), descriptor: int = -1
    ) -> None:
        with contextlib.suppress(CommplanError, OSError, struct.error):
            self.records.append(OpenRecord(path, process, members, descriptor))

    def absorb(self, other: Job) -> None:
        """Take the records of a job that has turned out to be this one."""
        self.records += other.records
        self.addresses |= other.addresses
        self._heard |= other._heard
        self._is_judged |= other._is_judged

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
        self._tell_gone()
        alarmed = self._alarmed(now)
        if not alarmed or self._is_judged:
            self._queried_at = self._suspected = None
        elif self._queried_at is not None:
            missing = self._known() - self._answers.keys()
            if not missing or now > self._queried_at + max(_ANSWER_S, _READINGS * self._reading_s):
                self._queried_at = None
                self._evaluate(alarmed, now)
            elif now > self._asked_at + _REPEAT_S:  # datagrams may be lost, above all in large jobs
                self._ask(missing, now, is_repeat=True)
        elif now >= self._again:
            self._queried_at, self._serial = now, self._serial + 1
            self._answers.clear()
            self._sent.clear()
            self._ask(self.addresses, now)
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
        self._sent.add(address)
        self._is_warned |= message.kind == "gone"
        if message.kind == "ask" and self.records:
            if now > self._stated_at + _CONFIRM_S:  # all hosts ask at about the same time
                for each in self.records:
                    each.live = live.read_live(each.descriptor)
                _, self._states = self._read(now)
                self._stated_at = time.monotonic()
            states = tuple(self._states.values())
            serial, is_repeat = message.serial, message.is_repeat
            answer = SidecarMessage(self.name, "answer", self._lowest, serial, states, is_repeat=is_repeat)
            self._send(answer, [address])
        elif message.kind == "answer" and message.serial == self._serial:
            self._answers |= {state.rank: state for state in message.states}
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

    def _ask(self, ranks: Iterable[int], now: float, *, is_repeat: bool = False) -> None:
        """Ask the sidecars of these ranks of other hosts for states."""
        self._asked_at = now
        if addresses := list({self.addresses[rank] for rank in ranks}):
            question = SidecarMessage(self.name, "ask", self._lowest, self._serial, is_repeat=is_repeat)
            self._send(question, addresses)

    def _tell_gone(self) -> None:
        """Have the other sidecars evaluate waits soon, if ranks here have died or their program has ended."""
        is_process = self._who == "process"
        ended = {n.rank for n in self.records if n.process.seconds or (is_process and n.live.left)}
        if ended - self._ended:
            self._ended |= ended
            self._tell("gone")

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

    def _alarmed(self, now: float) -> list[OpenRecord]:
        """The records of ranks that wait for longer than the bound, or whose steps have failed.

        Two seconds suffice after a death, and for a comparison if a rank has ended its program. One second
        suffices for the latter if whole steps are recorded, and for any comparison.
        """
        has_died = self._is_warned or any(each.process.seconds for each in self.records)
        has_ended = self._is_warned or any(each.live.left for each in self.records)
        is_process, alarmed = self._who == "process", list[OpenRecord]()
        for each in self.records:
            waited, compares, bound = waited_s(each.live, now), each.live.compares, each.live.bound_s
            is_alarmed = waited > bound or each.live.asks > each.live.answered
            is_alarmed |= has_died and waited > min(_GRACE_S, bound)
            is_alarmed |= has_ended and is_process and waited > min(_ENDED_S, bound)
            is_alarmed |= compares > 0 and now - compares * 1e-9 > _ENDED_S
            alarmed += [each] if is_alarmed else []
        return alarmed

    def _read(self, now: float) -> tuple[dict[OpenRecord, Record], dict[int, RankState]]:
        """The records and the states of the ranks on this host."""
        began, records = time.monotonic(), dict[OpenRecord, Record]()
        for each in self.records:
            with contextlib.suppress(CommplanError, OSError):
                records[each] = each.record()
        states = states_here(records, self._who, now)
        self._reading_s = time.monotonic() - began
        return records, states

    def _silent(self) -> dict[int, RankState]:
        """The states of the ranks of hosts whose sidecars send nothing."""
        return {
            rank: RankState(rank, "silent", silence("unknown", self.addresses[rank].host))
            for rank in sorted(self._known() - self._answers.keys())
            if self.addresses[rank] not in self._sent  # else answers are lost, or take long
        }

    def _evaluate(self, alarmed: Sequence[OpenRecord], now: float) -> None:
        began = time.thread_time()
        records, states = self._read(now)
        states |= self._answers | self._silent()
        # Records of many ranks take long to read. Waits for a core do not count.
        self._again = now + min(_LONGEST_S, max(_AGAIN_S, 10 * (time.thread_time() - began)))
        failed = [each for each in alarmed if each in records and each.live.asks > each.live.answered]
        failed = [each for each in failed if not states[each.rank].waits or each.live.is_aborted]
        waiting = [each for each in alarmed if each in records and states[each.rank].waits]
        waiting = [each for each in waiting if states[each.rank].condition == "alive"]
        if failed:
            self._explain(failed, states, now)
            return
        if not waiting:
            self._part([each for each in alarmed if each in records], states, now)
            return
        source, is_process = _source(waiting, states), self._who == "process"
        waiter, ends, compares = source.rank, bool(source.live.ends), source.live.is_comparing
        bound = source.live.bound_s
        if not compares and not is_process:  # a rank that compares a step may still execute an earlier one
            states = {rank: _without_comparison(state) for rank, state in states.items()}
        if not states[waiter].waits:
            return
        usual = bound if compares else usual_wait_s(records[source], source.live.waits, bound)
        late_s = max(usual, source.live.busy_s)
        still_s, stuck_s = (usual, late_s) if is_process else (bound, late_s if compares else bound)
        verdict = blame(states, waiter, Patience(bound, late_s, still_s, stuck_s))
        if compares and verdict.kind == "late":  # ranks may compile before they compare
            verdict = verdict._replace(kind="busy")
        has_ended = any(states[rank].condition == "ended" for rank in verdict.reasons)
        is_over = has_ended and not compares and not is_process  # the engine reports it
        is_still = min((states[rank].idle_s for rank in verdict.waiting), default=0.0) >= bound
        is_known = states.keys() >= self.ranks or verdict.kind in ("down", "apart")
        if not is_known and waited_s(source.live, now) > FIRST * bound:
            missing = tuple(sorted(self.ranks - states.keys()))
            text = f"the state of {listed(self._who, missing)} is unknown here"
            self._print(text, source, (waiter,), missing)
        if is_over or verdict.kind == "none" or not is_known:
            return
        if verdict.kind in ("stalled", "behind", "circle") and (compares or not is_still):
            return
        conditions = {states[rank].condition for rank in verdict.reasons}
        ended_s = _ENDED_S if is_process else _GRACE_S
        limit = ended_s if conditions == {"ended"} else _GRACE_S if "dead" in conditions else bound
        is_early = (is_process or compares) and waited_s(source.live, now) < min(limit, bound)
        if is_early and verdict.kind != "apart":
            return
        if conditions != {"ended"} and not self._is_confirmed(verdict, now):
            return
        if is_process and verdict.kind in ("stalled", "behind"):
            if states[waiter].idle_s >= usual:
                self._notice(verdict, states, source)
            return
        late = [each for each in self.records if each.rank in verdict.reasons]
        is_shown = [each for each in late if has_stack(states[each.rank]) or verdict.kind == "apart"]
        silent = [each for each in is_shown if not states[each.rank].stack]
        if any(each.process.queried_at and now < each.process.queried_at + _STACK_S for each in silent):
            self._again = now + _CONFIRM_S
            return
        states |= self._stacks(silent, states)
        text, line = described(verdict, states, self._who, waiter), states[waiter].waits[0].where
        if verdict.kind == "busy":
            is_excused = any(states[rank].is_excused for rank in verdict.reasons)
            if states[waiter].idle_s >= usual and not is_excused:
                excuse = _TIMEOUT if compares else f"the limit is {late_s:.0f} s: {_EXCUSE}" if ends else ""
                limit = f"\nnote: {excuse}" if excuse else ""
                self._print(f"{text}\nnote: {line} waits for it{limit}", source, verdict.waiting)
                self._again = now + min(_LONGEST_S, max(_CONFIRM_S, late_s - states[waiter].idle_s))
            return
        if verdict.kind == "late" and ends:
            text += f"\nnote: the limit is {late_s:.0f} s: {_EXCUSE}"
        if verdict.kind == "apart":
            self._judge(f"CP0854: {text}", "", now, abandoned=False)
        elif ends:
            self._judge(text, line, now, abandoned=False)
        else:
            down = tuple(verdict.reasons) if verdict.kind == "down" else ()
            self._print(f"{text}\nnote: {line} waits for it", source, verdict.waiting, down)

    def _explain(self, failed: Sequence[OpenRecord], states: Mapping[int, RankState], now: float) -> None:
        """Find out whether another process is the reason why a step has failed."""
        waiter = failed[0].rank
        verdict = blame(states, waiter, Patience(late=failed[0].live.busy_s, still=0.0))
        is_known = states.keys() >= self.ranks or verdict.kind == "down"
        is_reason = is_known and verdict.kind in _REASONS
        if not self._is_confirmed(verdict, now):
            return
        if is_reason and failed[0].live.ends:
            self._judge(described(verdict, states, self._who, waiter), "", now, abandoned=False)
            return
        if is_reason:
            failed[0].process.say(f"commplan: {described(verdict, states, self._who, waiter)}\n")
        for each in failed:
            with contextlib.suppress(OSError):
                live.write_answer(each.descriptor)

    def _notice(self, verdict: Verdict, states: Mapping[int, RankState], source: OpenRecord) -> None:
        """Print once that a step takes long on all processes: the devices may be computing."""
        wait, comparing = states[source.rank].waits[0], list[int]()
        comparing += [n for n, state in states.items() if any(each.waits_s for each in state.joint.values())]
        late = [n for n in verdict.waiting if n not in comparing] if comparing else []
        text = f"{wait.where} has not ended for {states[source.rank].idle_s:.0f} s"
        where = [f"{self._who} {n} is at {states[n].stack or 'an unknown line'}" for n in late]
        text += f"; {'; '.join([*where, _TIMEOUT] if late else ['no process is late for it'])}"
        self._print(text, source, verdict.waiting)

    def _is_confirmed(self, verdict: Verdict, now: float) -> bool:
        """Whether the last evaluation had the same result. Otherwise the next one is soon."""
        result = verdict.kind, tuple(verdict.reasons), verdict.waiting
        is_same, self._suspected = result == self._suspected, result
        if not is_same:
            self._again = now + _CONFIRM_S
        return is_same

    def _stacks(self, silent: Sequence[OpenRecord], states: Mapping[int, RankState]) -> dict[int, RankState]:
        """The states of ranks that do not answer, with their Python if a signal shows it."""
        explained: dict[int, RankState] = {}
        for each in silent:
            stack = main_stack(each.path) or "an unknown line"
            explained[each.rank] = states[each.rank]._replace(stack=f"{stack}; {_HELD}")
        return explained

    def _print(
        self, text: str, source: OpenRecord, waiting: Sequence[int], named: tuple[int, ...] = ()
    ) -> None:
        """Print `text` once for each wait and each set of `named` ranks, on the first rank that waits."""
        wait = source.live.waits or source.live.compares, named
        first = next((each for each in self.records if each.rank == min(waiting)), None)
        if self._noticed != wait and first is not None:
            self._noticed = wait
            first.process.say(f"commplan: {text}\n")

    def _part(self, alarmed: Sequence[OpenRecord], states: Mapping[int, RankState], now: float) -> None:
        """Decide whether the ranks that a rank waits for at its end are dead.

        A rank that is alive may still have work to do.
        """
        source = next((each for each in alarmed if each.live.parting), None)
        if source is None or not states.keys() >= self.ranks:
            return
        waiter = source.rank
        remaining = [rank for rank in sorted(states) if LEFT not in states[rank].begun and rank != waiter]
        limits, waited = Patience(late=source.live.busy_s), now - source.live.parting * 1e-9
        down = {n: states[n].how for n in remaining if states[n].how and is_down(states[n], waited, limits)}
        states = {rank: state._replace(condition="silent") for rank, state in states.items()}
        verdict = Verdict("down" if len(down) == len(remaining) else "busy", down)
        if not remaining or not self._is_confirmed(verdict, now):
            return
        if verdict.kind == "down":
            first, *notes = described(verdict, states, self._who, waiter).splitlines()
            text = "\n".join([f"{first}, and all others have ended", *notes])
            if source.live.ends:
                self._judge(text, "", now, abandoned=True)
            elif self._noticed != text:
                self._noticed = text
                source.process.say(f"commplan: {text}\n")
            return
        late = next((rank for rank in remaining if rank not in down and not states[rank].waits), None)
        has_waited = waited > FIRST * source.live.bound_s
        if late is not None and has_waited and not source.live.served and self._noticed != "parting":
            self._noticed = "parting"
            _, *notes = described(Verdict("busy", {late: ""}), states, self._who, waiter).splitlines()
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
_LATE = "`with run.late():` or commplan.guard.late()"
_EXCUSE = f"put longer work into {_LATE}, or busy_s=SECONDS waits longer"


def _source(waiting: Sequence[OpenRecord], states: Mapping[int, RankState]) -> OpenRecord:
    """The rank whose wait is evaluated: the oldest collective, or a comparison that cannot end."""
    oldest = sorted(waiting, key=lambda each: max(each.live.waits or each.live.compares, each.live.moved))
    comparison = next((each for each in oldest if each.live.is_comparing), None)
    if comparison is not None:
        limits = Patience(late=comparison.live.busy_s)
        if blame(states, comparison.rank, limits).kind == "down":
            return comparison
    return next((each for each in oldest if not each.live.is_comparing), oldest[0])


def _without_comparison(state: RankState) -> RankState:
    return state._replace(waits=tuple(wait for wait in state.waits if wait.where != COMPARISON))


class Observer:
    """The jobs of all processes that the sidecar attends."""

    def __init__(self, send: Send, address: Address) -> None:
        self.jobs: list[Job] = []
        self._send, self._address = send, address

    def add(
        self, name: str, path: Path, process: AttendedProcess, who: str, members: tuple[int, ...] = (),
        descriptor: int = -1,
    ) -> None:  # fmt: skip
        """Add a record to a job.

        Jobs of the same name are one job if they share processes.
        """
        new = Job(name, self._send, self._address, who)
        new.add(path, process, members, descriptor)
        job, *duplicates = [each for each in self.jobs if each.name == name and each.ranks & new.ranks] or [
            new
        ]
        if job is new:
            self.jobs += [new] if new.records else []
            return
        job.absorb(new)
        for other in duplicates:
            job.absorb(other)
            self.jobs.remove(other)

    def look(self) -> None:
        for job in self.jobs:
            # A file that a user damages, or one job, must not end the sidecar of all.
            with contextlib.suppress(Exception):
                job.look(time.monotonic())

    def take(self, messages: Iterable[SidecarMessage]) -> None:
        for message in messages:
            for job in self.jobs:
                if job.name == message.job:
                    with contextlib.suppress(Exception):
                        job.take(message)

    def add_hosts(self, path: Path, hosts: Mapping[tuple[int, ...], Address]) -> None:
        """Add the sidecars of other hosts, by their ranks, to the job of a record."""
        for job in self.jobs:
            if any(each.path == path for each in job.records):
                job.add_hosts(hosts)

    def remove(self, path: Path) -> None:
        """Close a record to which its process no longer writes."""
        for job in self.jobs.copy():
            job.remove(path)
            if not job.records:
                self.jobs.remove(job)

    def drop(self, running: Sequence[AttendedProcess]) -> None:
        """Close the records of jobs without running processes."""
        for job in self.jobs.copy():
            if not any(each.process in running for each in job.records):
                self.jobs.remove(job)
                job.close()
