"""The watchdog of processes under `jax.distributed`: finds the process that blocks a step.

If a step does not end, a process queries the progress of the others, and all end with the same verdict.
Threads send and answer the queries, without the coordinator, which may be stopped or dead. A running
executable cannot be cancelled: a process whose main thread waits in one prints the verdict and exits. JAX and
Gloo abort a process that loses another one; `abort_hook` delays that until the verdict is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from zlib import crc32

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.hang_limits import HangLimits, most_patient
from commplan.lowering.mpi.job.watchdog import main_stack
from commplan.recorder.blame import ranks_of
from commplan.recorder.file import path_of, read_records, start_recording
from commplan.recorder.processes import WATCH_THREAD
from commplan.recorder.stacks import main_stack as main_stack_of
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
    listed,
)
from commplan.runtime.observe import abort_hook, interruption
from commplan.runtime.observe.calls import Calls, key_of
from commplan.runtime.observe.interruption import Place, is_interruptible
from commplan.runtime.observe.joint_calls import SETTLE_S, JointReport
from commplan.runtime.observe.peers import DOWN, Endpoint, Message, Peer
from commplan.sidecar import attend
from commplan.wait import Wait as TimedWait
from commplan.wait import until

EXIT_STATUS = 75  # of a process that ends with a verdict: EX_TEMPFAIL of sysexits.h
_TICK_S = 0.25
_GRACE_S = 2.0  # for an answer
_SETTLE_S = 1.0  # for a process to detect the problem without the others
_UNWIND_S = 10.0  # for the `finally` blocks of a main thread that is in no step
_STACK = 2048  # characters of the main thread's stack
_SHOWN = 4  # processes that a line names
_STACKS = 4  # processes whose stacks are requested at the same time
_ABORTED = "was aborted by its runtime: its own output says why"
# The states of a process in the kernel that are also conditions.
_CONDITIONS: Mapping[str, Condition] = {
    "dead": "dead",
    "stopped": "stopped",
    "stuck in the kernel": "stuck in the kernel",
}


class Watchdog:
    """The watchdog of this process, for all meshes that it shares with others."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.own = endpoint, endpoint.own
        self._lock = threading.Lock()  # protects the attributes below
        self._calls: dict[str, Calls] = {}
        self._limits: dict[str, HangLimits] = {}
        self._late = 0
        self._failure = ""  # an uncaught error that JAX may have raised
        self._left: str | None = None  # the reason why this process ends; None before
        self._status = 0  # its exit status
        self._gone: dict[int, tuple[float, RankState]] = {}  # others that end, and when this was received
        self._heard: set[int] = set()
        self._asked: float | None = None
        self._serial, self._again, self._scanned, self._noticed = 0, 0.0, 0.0, -1
        self._reports: dict[int, RankState] = {}
        self._joint: dict[int, Mapping[str, JointReport]] = {}  # of the last message of each
        self._stacks: dict[int, str] = {}  # of processes that do not answer
        self._asking: dict[int, threading.Thread] = {}
        self._verdict, self._code, self._is_said, self._settled = "", "", False, threading.Event()
        self._is_alarmed = False  # whether the others are queried for more than a comparison
        self._deadline, self._place = 0.0, Place(0, 0)  # set with the verdict; the main thread's position
        atexit.register(self._ending)
        threading.Thread(target=self._run, name="commplan-watchdog", daemon=True).start()

    def watch(self, peers: Sequence[Peer], plan: str) -> Calls:
        """Watch the calls that these processes make together; `plan` names their record."""
        with self._lock:
            others = {peer.process: peer for peer in peers if peer.process != self.own}
            self.endpoint.others = others | self.endpoint.others
            calls = self._calls_of([peer.process for peer in peers], plan)
            limits = most_patient([peer.limits for peer in peers])
            self._limits[calls.key] = most_patient([limits, self._limits.get(calls.key, limits)])
        self.endpoint.send(Message(self.own, "hello"), list(others))
        return calls

    def part(self, whole: Calls, processes: Sequence[int], plan: str) -> Calls:
        """The calls of some of the processes of `whole`."""
        with self._lock:
            calls = self._calls_of(processes, plan)
            self._limits.setdefault(calls.key, self._limits[whole.key])
        return calls

    def _calls_of(self, processes: Sequence[int], plan: str) -> Calls:
        name = key_of(processes)
        if name not in self._calls:
            first = self.endpoint.others.get(processes[0])
            job = f"{self.endpoint.token if first is None else first.token}{crc32(name.encode()):08x}"
            record = start_recording(job, plan, self.own, len(self.endpoint.others) + 1)
            if record is not None:
                attend(record.path, f"process {self.own}")
            abort_hook.on_failure(self._failing)  # again: exit handlers of the record run after this one
            self._calls[name] = Calls(processes, record)
        return self._calls[name]

    @contextlib.contextmanager
    def late(self) -> Generator[None]:
        """Announce to the others, while the block runs, that this process is late."""
        self._late += 1
        try:
            yield
        finally:
            self._late -= 1

    # How the main thread ends.

    def _failing(self, error: BaseException, status: int) -> None:
        """Handle an uncaught error. If JAX may have raised it, query the others: one may be the cause."""
        lines = f"{type(error).__name__}: {error}".splitlines()
        text = f"exit with {status}" if isinstance(error, SystemExit) else lines[0][:200]
        self._status = interruption.STATUS if isinstance(error, KeyboardInterrupt) else status
        if isinstance(error, RuntimeError | ValueError) and not self._verdict:  # JAX raises either
            self._failure = text
            with contextlib.suppress(TimeoutError):
                until(self._settled.wait, TimedWait(2 * _GRACE_S + _SETTLE_S, _timed_out))
        if not self._verdict:
            self._leave(text)

    def _leave(self, why: str) -> None:
        self._left = why
        self._send("left", list(self.endpoint.others))

    def _send(self, kind: str, processes: Sequence[int], serial: int = 0) -> None:
        """Send the state of this process."""
        joint = {key: calls.joint.report(waits=calls.waits > 0) for key, calls in self._calls.items()}
        self.endpoint.send(Message(self.own, kind, serial, state=self._state_here(), joint=joint), processes)

    def _ending(self) -> None:
        """End the process at exit, before JAX's exit handler waits for the others, for minutes."""
        if self not in _running:
            return  # a forked child
        if self._verdict:
            with self._lock:
                self._say()
        if self._status and not self._verdict and self.own == 0:
            time.sleep(_GRACE_S)  # the others need time to print: JAX aborts them without a coordinator
        if self._verdict or self._status:
            interruption.end_process(EXIT_STATUS if self._verdict else self._status)
        self._leave("")

    # The thread.

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/thread-self/comm").write_text(WATCH_THREAD)
        while True:
            self.endpoint.receive(self._take, _TICK_S)
            with self._lock:
                for calls in self._calls.values():
                    calls.observe()
                if self._verdict:
                    self._end(time.monotonic())
                elif self._calls:
                    self._end_interrupted(interruption.lasts())
                    self._look(time.monotonic())

    def _end_interrupted(self, lasts: float) -> None:
        """End this process `lasts` seconds after Ctrl-C if its main thread waits in a step."""
        waits = self._waits()
        if waits is None or self._left is not None or not is_interruptible():
            return
        median_s = waits.median_s()
        # A call that began after Ctrl-C shows that the program has handled it and continues.
        if lasts < max(_GRACE_S, 2 * median_s) or time.monotonic() - waits.began() < lasts:
            return
        others = [process for process in waits.processes if process != self.own]
        states = {process: self._state(process) for process in others}
        down = [f"process {p} {self.endpoint.others[p].silence(s)}" for p, s in states.items() if s in DOWN]
        awaited = " and ".join(down) or f"it waits for {listed('process', others)}"
        text = f"{waits.current()} has not ended for {time.monotonic() - waits.began():.1f} s: {awaited}"
        self._leave("KeyboardInterrupt")
        print(f"commplan: interrupted: {text}", file=sys.stderr, flush=True)
        interruption.end_process(interruption.STATUS)

    def _moved(self) -> float:
        return max(calls.moved for calls in self._calls.values())

    def _waits(self) -> Calls | None:
        """The `Calls` with the oldest call that has not ended; None if all calls have ended."""
        return min((calls for calls in self._calls.values() if calls.waits), key=Calls.began, default=None)

    def _look(self, now: float) -> None:
        """Check for problems. If there is one, query the others, and evaluate their answers."""
        for heard, gone in self._gone.values():
            joint = self._joint[gone.rank]
            missed = any(
                calls.waits > gone.begun.get(calls.key, calls.waits)
                or (calls.key in joint and calls.joint.misses(joint[calls.key].number))
                for calls in self._calls.values()
            )
            settled = bool(self._failure) or now > heard + _SETTLE_S
            if self._left is None and settled and (missed or gone.how):
                states = {self.own: self._state_here(), gone.rank: gone}
                verdict = blame(states, self.own)
                if verdict.kind != "order" or len(self.endpoint.others) > 1:
                    verdict = Verdict("down", {gone.rank: gone.how})
                self._judge(described(verdict, states, "process", self.own) + self._awaiting())
                return
        if self._asked is not None:
            missing = self._missing()
            gone = all(self._state(process) in ("dead", "stopped") for process in missing)
            if (gone or now > self._asked + _GRACE_S) and self._has_stacks(missing):
                self._asked, self._again = None, now + _SETTLE_S
                self._weigh(missing)
            else:
                self.endpoint.send(Message(self.own, "ask", self._serial), missing)
        elif now > self._again and ((alarmed := self._alarmed(now)) or self._compares()):
            self._is_alarmed = alarmed
            self._asked, self._serial = now, self._serial + 1
            self._reports.clear()
            self._stacks.clear()
            self._asking.clear()
            self.endpoint.send(Message(self.own, "ask", self._serial), self._missing())

    def _alarmed(self, now: float) -> bool:
        """Whether a step has waited for too long, has failed, or is aborting this process."""
        idle, waits = now - self._moved(), self._waits()
        if self._failure:
            return True
        if idle > 2 * _TICK_S and now > self._scanned + _SETTLE_S:
            self._scanned = now
            if abort_hook.aborted():
                return True
        if waits is None:
            return False
        died = any(self._state(process) == "dead" for process in waits.processes if process != self.own)
        bound = self._limits[waits.key].watchdog_s or 0.0
        return idle > (min(_GRACE_S, bound) if died else bound)

    def _compares(self) -> bool:
        """Whether a comparison of a step waits for others."""
        return any(calls.joint.waited() > SETTLE_S for calls in self._calls.values())

    def _missing(self) -> list[int]:
        return [number for number in self.endpoint.others if number not in {*self._reports, *self._gone}]

    def _state(self, process: int) -> str:
        """See `recorder.blame.Rank`; `unknown` for a process that has reported its end."""
        return "unknown" if process in self._gone else self.endpoint.others[process].state

    def _disagreement(self) -> Diagnostic | None:
        """The error if another process runs a step that this one compares."""
        for key, calls in self._calls.items():
            reports = {p: self._joint[p][key] for p in self._reports if key in self._joint[p]}
            if (diagnostic := calls.joint.disagreement(reports)) is not None:
                return diagnostic
        return None

    def _weigh(self, missing: Sequence[int]) -> None:
        if (diagnostic := self._disagreement()) is not None:
            text = "\nnote: ".join((diagnostic.message, *(note.text for note in diagnostic.notes)))
            self._judge(text, diagnostic.code)
        if diagnostic is not None or not self._is_alarmed:
            return
        waits, (patience, usual_s) = self._waits(), self._patience()
        states = self._reports | {process: gone for process, (_, gone) in self._gone.items()}
        states[self.own] = mine = self._state_here()
        for process in missing:
            state = self._state(process)
            is_silent = mine.idle_s > usual_s and not self._starved(process, mine.idle_s)
            if (state != "alive" or is_silent) and (state != "unknown" or process in self._heard):
                states[process] = self._silent_state(process, state)
        verdict = blame(states, self.own, patience)
        is_known = all(process in states for process in missing)
        if verdict.kind == "down" or (is_known and verdict.kind in ("order", "late", "circle")):
            excuse = f"\nnote: {self._excuse()}" if verdict.kind == "late" else ""
            self._judge(described(verdict, states, "process", self.own) + excuse + self._awaiting())
        elif self._failure:
            self._settled.set()
        elif waits and not missing and waits.waits != self._noticed:
            is_stalled = verdict.kind in ("stalled", "behind")
            if is_stalled and min(state.idle_s for state in states.values()) >= usual_s:
                self._notice(waits, mine.idle_s)
            is_excused = any(states[process].is_excused for process in verdict.reasons)
            if verdict.kind == "busy" and mine.idle_s >= usual_s and not is_excused:
                self._noticed = waits.waits
                if self.own == verdict.waiting[0]:
                    text = described(verdict, states, "process", self.own) + self._awaiting()
                    print(f"commplan: {text}\nnote: {self._excuse()}", file=sys.stderr, flush=True)

    def _notice(self, waits: Calls, idle_s: float) -> None:
        """Print once that a step takes long on all processes: the devices may be computing."""
        self._noticed = waits.waits
        joint = {p: self._joint[p][waits.key] for p in self._reports if waits.key in self._joint[p]}
        late = waits.joint.awaited("process", joint)
        why = "; ".join([*late[:_SHOWN], waits.joint.limit()]) if late else "no process is late for it"
        text = f"commplan: {waits.current()} has not ended for {idle_s:.0f} s; {why}"
        print(text, file=sys.stderr, flush=True)

    def _starved(self, process: int, idle_s: float) -> bool:
        """Whether a process may be late because its machine is busy. False after the limit for compiling."""
        longest = max(limits.watchdog_s or 0.0 for limits in self._limits.values())
        return idle_s < FIRST * longest and self.endpoint.others[process].waits_for_core

    def _has_stacks(self, missing: Sequence[int]) -> bool:
        """Whether the stacks of live processes that do not answer are collected, which takes seconds."""
        alive = [p for p in missing if p not in self._asking and self._state(p) == "alive"]
        for process in alive[: _STACKS - len(self._asking)]:
            recordings = (calls.recording for calls in self._calls.values() if process in calls.processes)
            if (recording := next(filter(None, recordings), None)) is not None:
                words = process, path_of(recording.job, process)
                self._asking[process] = thread = threading.Thread(target=self._ask, args=words, daemon=True)
                thread.start()
        return not any(thread.is_alive() for thread in self._asking.values())

    def _ask(self, process: int, record: Path) -> None:
        self._stacks[process] = main_stack_of(record)

    def _silent_state(self, process: int, state: str) -> RankState:
        """The state of a process that does not answer."""
        peer, stack = self.endpoint.others[process], self._stacks.get(process)
        notes = peer.identity(state), *([f"its Python: {stack}"] if stack else [])
        recent: dict[str, tuple[int, tuple[str, ...]]] = {}
        for calls in self._calls.values() if state == "dead" else ():
            if calls.recording is not None and process in calls.processes:
                with contextlib.suppress(CommplanError):
                    (rank,) = ranks_of(read_records([str(path_of(calls.recording.job, process))]))
                    recent[calls.key] = rank.recent
        condition = _CONDITIONS.get(state, "silent")
        return RankState(process, condition, peer.silence(state), tuple(notes), recent=recent)

    def _patience(self) -> tuple[Patience, float]:
        """The patience for the step that has not ended, and the seconds after which it counts as slow."""
        waits = self._waits()
        if waits is None:
            return Patience(), 0.0
        limits = self._limits[waits.key]
        usual_s = waits.usual_s(bound := limits.watchdog_s or 0.0)
        return Patience(bound, max(usual_s, limits.busy_s)), usual_s

    def _excuse(self) -> str:
        limit_s = max(limits.busy_s for limits in self._limits.values())
        longer = "`with run.late():` or commplan.guard.late()"
        return f"the limit is {limit_s:.0f} s: put longer work into {longer}, or busy_s=SECONDS waits longer"

    def _awaiting(self) -> str:
        """A note on the step that has not ended, or has failed."""
        waits = self._waits() or max(self._calls.values(), key=lambda calls: calls.moved)
        if waits.waits:
            return f"\nnote: {waits.current()} waits for it"
        return f"\nnote: {waits.current()} failed: {self._failure}" if self._failure else ""

    def _judge(self, text: str, code: str = "CP0834") -> None:
        if code == "CP0834" and most_patient([*self._limits.values()]).on_hang == "report":
            number = max(calls.waits for calls in self._calls.values())
            if number != self._noticed:
                self._noticed = number
                print(f"commplan: {text}", file=sys.stderr, flush=True)
            self._settled.set()
            return
        self._accept(text, code)
        self.endpoint.send(Message(self.own, "verdict", text=text, code=code), list(self.endpoint.others))

    def _accept(self, text: str, code: str) -> None:
        if self._verdict or self._left:
            return
        self._verdict, self._code = text, code
        for calls in self._calls.values():
            calls.judged(text.splitlines()[0])

    def _end(self, now: float) -> None:
        """Print the verdict and exit. A main thread that is in no step is interrupted first, as by Ctrl-C."""
        place = interruption.main_place()
        if not self._deadline:
            self._say()
            if self.own == 0:  # JAX aborts the others without a coordinator, before they print
                time.sleep(2 * _TICK_S)
            if self._waits() or self._failure or self._left is not None or not is_interruptible():
                interruption.end_process(EXIT_STATUS)
            self._deadline, self._place = now + _UNWIND_S, place
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif now > self._deadline - (_UNWIND_S - _SETTLE_S if place == self._place else 0.0):
            interruption.end_process(EXIT_STATUS)

    def _say(self) -> None:
        if not self._is_said:
            self._is_said = True
            first, *notes = self._verdict.splitlines()
            remarks = tuple(Note(note.removeprefix("note: ")) for note in notes)
            print(CommplanError(Diagnostic(self._code, first, None, remarks)), file=sys.stderr, flush=True)
            self._settled.set()

    def _state_here(self) -> RankState:
        now, calls, waiting = time.monotonic(), self._waits(), tuple[Wait, ...]()
        idle = now - self._moved()
        if calls is not None:
            where, number = calls.current(), calls.waits
            needs = tuple(Need(process, calls.key, number) for process in calls.processes)
            waiting = (Wait(where, now - calls.began(), needs, f"come to {where}", number),)
        last, runs = max(self._calls.values(), key=lambda calls: calls.moved).finished()
        name = f"process {os.getpid()} on {socket.gethostname()}"
        state = RankState(
            self.own,
            waits=waiting,
            begun={key: calls.number for key, calls in self._calls.items()},
            recent={key: calls.recent() for key, calls in self._calls.items()},
            idle_s=idle,
            is_excused=self._late > 0,
            process=name,
            last=last,
            runs=runs,
            stack=main_stack()[:_STACK] if not waiting and idle > 2 * _TICK_S else "",
        )
        notes = (f"process {self.own} ({name}) last finished {last}, {runs} times so far",) if last else ()
        if self._left is not None:
            return state._replace(condition="ended", how=self._left, notes=notes)
        return (
            state._replace(condition="aborted", how=_ABORTED, notes=notes) if abort_hook.aborted() else state
        )

    def _take(self, message: Message) -> None:
        process, state = message.process, message.state
        with self._lock:
            self._heard.add(process)
            if state is not None:
                self._joint[process] = message.joint
            if message.kind == "ask" and self._calls:
                self._send("answer", [process], message.serial)
            elif message.kind == "verdict":
                self._accept(message.text, message.code)
            elif state is not None and state.condition == "ended":
                self._gone.setdefault(process, (time.monotonic(), state))
            elif state is not None and message.serial == self._serial:
                self._reports[process] = state


_running: list[Watchdog] = []
os.register_at_fork(after_in_child=_running.clear)


def start(
    own: int, coordinator: str, exchange: Callable[[Peer], Mapping[int, Peer]], limits: HangLimits, plan: str
) -> Calls | None:
    """Watch the calls of processes that bind the same plan; None if one of them disables the watchdog.

    Args:
        own: the number of this process.
        coordinator: HOST:PORT.
        exchange: returns the peers of all processes, by number; all of them call it.
    """
    try:
        endpoint = _running[0].endpoint if _running else Endpoint(own, coordinator)
    except (OSError, ValueError) as error:
        warnings.warn(f"processes are not watched: {error}", RuntimeWarning, 2)
        exchange(Peer(own, "", 0, "", 0, "", ""))
        return None
    peers = exchange(endpoint.peer(limits))
    if any(peer.limits.watchdog_s is None for peer in peers.values()):
        return None
    if not _running:
        _running.append(Watchdog(endpoint))
    return _running[0].watch([peers[process] for process in sorted(peers)], plan)


def part(whole: Calls | None, processes: Sequence[int], plan: str) -> Calls | None:
    """The calls of some of the processes of `whole`; None for a single process."""
    if whole is None or len(processes) == 1 or not _running or _running[0].own not in processes:
        return None
    return _running[0].part(whole, processes, plan)


@contextlib.contextmanager
def expected_late() -> Generator[None]:
    """Announce to the watchdogs of other processes, while the block runs, that this process is late."""
    with _running[0].late() if _running else contextlib.nullcontext():
        yield


def _timed_out(waited: float) -> NoReturn:
    raise TimeoutError(waited)
