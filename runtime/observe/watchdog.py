"""Watch the steps that processes run together: under `jax.distributed`, or of a guarded program under MPI.

The sidecar of the host finds the process that blocks a step, from the records of all processes. A thread of
each process records the ends of steps and waits for the verdict. A running executable cannot be canceled: a
process whose main thread waits in one prints the verdict and exits. JAX and Gloo abort a process that loses
another one; `abort_hook` delays that until the verdict is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import msgspec

from commplan.diagnostics import CommplanError
from commplan.hang_limits import UNWATCHED, HangLimits, most_patient
from commplan.lowering.mpi.job.watchdog import put_state
from commplan.recorder import live
from commplan.recorder.file import Recording, path_of, start_recording
from commplan.recorder.processes import process_state, silence
from commplan.recorder.reading import writer
from commplan.recorder.verdict import listed
from commplan.runtime.observe import abort_hook, interruption
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.interruption import Place, is_interruptible
from commplan.sidecar import attend, introduce_hosts
from commplan.sidecar.mail import Address

EXIT_STATUS = 75  # The exit status after a verdict: EX_TEMPFAIL of sysexits.h.
_TICK_S = 0.25  # Seconds between two observations by the thread.
_GRACE_S = 2.0  # Seconds after Ctrl-C until the process ends.
_SETTLE_S = 1.0  # Seconds between two checks for an abort, and for a main thread that does not move.
_ANSWER_S = 5.0  # Seconds for the sidecar to find the cause of a failed step.
_LAST_S = 3.0  # Seconds for the other processes to report the failure of process 0.
_UNWIND_S = 10.0  # Seconds for the `finally` blocks of a main thread outside of steps.
_MOST_CHARACTERS = 200  # The most characters of an error that messages show.
# The states of `process_state` of a process that cannot answer.
_DOWN = ("dead", "stopped", "stuck in the kernel")


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A message of a process to the others, which each process sends twice; see `start`.

    Attributes:
        limits: The limits of its waits.
        sidecar: The address of the sidecar of its host; None in the first message, or if there is none.
    """

    limits: HangLimits = UNWATCHED
    sidecar: Address | None = None


class _Watched(NamedTuple):
    """Calls that are watched.

    Attributes:
        calls: The calls.
        number: The number of this process among those that make the calls.
        job: The name of the job.
        limits: The most patient limits of the programs that make the calls.
        sidecar: The address of the sidecar of this host; None if none watches the calls.
    """

    calls: Calls
    number: int
    job: str
    limits: HangLimits
    sidecar: Address | None


class Watchdog:
    """The watchdog of this process, for all meshes that it shares with others.

    Attributes:
        number: The number of this process.
        watched: By their processes, the calls that are watched.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.RLock()  # Protects the attributes below.
        self.watched: dict[str, _Watched] = {}
        self._failure = ""  # An uncaught error that JAX may have raised, or "".
        self._end_reason: str | None = None  # The reason why this process ends; None before, "" at success.
        self._status = 0  # The exit status of this process if it fails.
        self._scanned = 0.0  # The time of the last check for an abort, on `time.monotonic`.
        self._is_aborted = False  # Whether a thread of JAX is aborting this process.
        self._verdict: live.WrittenVerdict | None = None
        self._is_printed = False  # Whether the verdict was printed.
        self._settled = threading.Event()  # Set after the verdict, or the answer that there is none.
        self._deadline = 0.0  # When the process ends after a verdict at the latest; 0 before a verdict.
        self._place = Place(0, 0)  # The main thread's position when it was interrupted by a verdict.
        atexit.register(self._ending)
        threading.Thread(target=self._run, name="commplan-watchdog", daemon=True).start()

    @property
    def _calls(self) -> list[Calls]:
        return [each.calls for each in self.watched.values()]

    @property
    def _recordings(self) -> list[Recording]:
        return [calls.recording for calls in self._calls if calls.recording is not None]

    def watch(
        self, number: int, job: str, processes: Sequence[int], limits: HangLimits, plan: str
    ) -> tuple[Calls, Address | None]:
        """Watch the calls that these processes make together.

        Args:
            number: The number of this process among them.
            job: The name of the job.
            processes: The numbers of the processes, this one included.
            limits: The limits of the waits. They apply if they are more patient than those of earlier calls.
            plan: The name of the plan, for the record.

        Returns:
            The calls, and the address of the sidecar of this host, or None if none watches the calls. The
            same ones for the same processes.
        """
        with self._lock:
            key, sidecar = ",".join(map(str, processes)), None
            if (watched := self.watched.get(key)) is not None:
                limits = most_patient([limits, watched.limits])
                if watched.calls.recording is not None:
                    live.put_limits(watched.calls.recording, limits)
                self.watched[key] = watched._replace(limits=limits)
                return watched.calls, watched.sidecar
            recording = start_recording(f"{job}{crc32(key.encode()):08x}", plan, number, max(processes) + 1)
            if recording is not None:
                put_state(recording, limits)
                label = f"process {number}"
                sidecar = attend(recording.path, label, watched=True, job=job, members=processes)
            # Register it again: handlers run in reverse order, and that of the record must run later.
            abort_hook.on_failure(self._failing)
            calls = Calls(processes, recording)
            self.watched[key] = _Watched(calls, number, job, limits, sidecar)
            return calls, sidecar

    # How the main thread ends.

    def _failing(self, error: BaseException, status: int) -> None:
        """Handle an uncaught error. If JAX may have raised it, another process may be the cause."""
        lines = f"{type(error).__name__}: {error}".splitlines()
        text = f"exit with {status}" if isinstance(error, SystemExit) else lines[0][:_MOST_CHARACTERS]
        self._status = interruption.STATUS if isinstance(error, KeyboardInterrupt) else status
        is_watched = any(each.sidecar is not None for each in self.watched.values())
        # JAX raises a RuntimeError or a ValueError if another process breaks a collective.
        if is_watched and isinstance(error, RuntimeError | ValueError) and not self._verdict:
            with self._lock:
                self._failure = text
                self._ask()
            self._settled.wait(_ANSWER_S)
        if not self._verdict:
            self._leave(text)

    def _ask(self, *, is_aborted: bool = False) -> None:
        """Make the sidecar find the reason why a step has failed."""
        for calls in self._calls:
            calls.observe()
        for recording in self._recordings:
            live.put_failure(recording, is_aborted=is_aborted)

    def _leave(self, why: str) -> None:
        """Record that this process ends, with an error or, if `why` is "", without one."""
        with self._lock:
            self._end_reason = why
            for calls in self._calls:
                calls.observe()
            for recording in self._recordings:
                recording.put_end(f"has ended with {why}" if why else "has ended")
                live.put_left(recording)

    def _ending(self) -> None:
        """End the process at exit, before JAX's exit handler waits for the others, for minutes."""
        if self not in _running:
            return  # This is a forked child.
        if self._verdict:
            with self._lock:
                self._print_verdict()
        if self._status and not self._verdict and self.number == 0:
            time.sleep(_LAST_S)  # Without a coordinator JAX aborts the others before they print.
        if self._verdict or self._status:
            interruption.end_process(EXIT_STATUS if self._verdict else self._status)
        self._leave("")

    # The thread.

    def _run(self) -> None:
        """Observe the calls, and end the process after a verdict; the body of the thread."""
        while True:
            time.sleep(_TICK_S)
            with self._lock:
                for calls in self._calls:
                    calls.observe()
                self._take_verdict()
                if self._verdict:
                    self._end(time.monotonic())
                elif self._calls:
                    self._end_interrupted(interruption.lasts())
                    self._look_for_abort(time.monotonic())

    def _take_verdict(self) -> None:
        """Read the verdict of the sidecar, or its answer that no other process is the cause of a failure."""
        if self._verdict or self._end_reason:
            return
        for recording in self._recordings:
            if (verdict := live.verdict_of(recording)) is not None:
                notes = (*verdict.notes, *self._awaiting(verdict.line))
                self._verdict = verdict._replace(notes=notes)
                for calls in self._calls:
                    calls.judged(verdict.message)
                return
            if self._failure and live.is_answered(recording):
                self._settled.set()

    def _look_for_abort(self, now: float) -> None:
        """Request a verdict if JAX aborts this process, which the handler of the signal delays."""
        idle = now - max(calls.moved for calls in self._calls)
        if not self._is_aborted and idle > 2 * _TICK_S and now > self._scanned + _SETTLE_S:
            self._scanned = now
            if abort_hook.aborted():
                self._is_aborted = True
                self._ask(is_aborted=True)

    def _end_interrupted(self, lasts: float) -> None:
        """End this process `lasts` seconds after Ctrl-C if its main thread waits in a step."""
        waits = self._waits()
        if waits is None or self._end_reason is not None or not is_interruptible():
            return
        median_s = waits.median_s()
        # A call that began after Ctrl-C shows that the program has handled it and continues.
        if lasts < max(_GRACE_S, 2 * median_s) or time.monotonic() - waits.began() < lasts:
            return
        peers = [process for process in waits.processes if process != self.number]
        states = {process: _state(waits, process) for process in peers}
        down = [f"process {process} {silence(s, '')}" for process, s in states.items() if s in _DOWN]
        awaited = " and ".join(down) or f"it waits for {listed('process', peers)}"
        text = f"{waits.current()} has not ended for {time.monotonic() - waits.began():.1f} s: {awaited}"
        self._leave("KeyboardInterrupt")
        interruption.print_stderr(f"commplan: interrupted: {text}")
        interruption.end_process(interruption.STATUS)

    def _waits(self) -> Calls | None:
        """The `Calls` with the oldest call that has not ended; None if all calls have ended."""
        return min((calls for calls in self._calls if calls.waits), key=Calls.began, default=None)

    def _awaiting(self, line: str) -> list[str]:
        """Notes on the step that has not ended, or has failed, for the verdict of the sidecar.

        Args:
            line: The line of the plan or program that waits, or "".
        """
        if line or not self._failure:
            return [f"{line} waits for it"] if line else []
        last = max(self._calls, key=lambda each: each.moved)
        return [f"{last.current()} failed: {self._failure}"]

    def _end(self, now: float) -> None:
        """Print the verdict and exit. A main thread that is in no step is interrupted first, as by Ctrl-C.

        The process then ends after `_UNWIND_S`, or after `_SETTLE_S` if the main thread does not move.
        """
        place = interruption.main_place()
        if not self._deadline:
            self._print_verdict()
            # Without the coordinator JAX aborts the others before they print; without a process that has
            # left, their steps fail.
            if self.number == 0 or self._end_reason is not None:
                time.sleep(4 * _TICK_S)
            if self._waits() or self._failure or self._end_reason is not None or not is_interruptible():
                interruption.end_process(EXIT_STATUS)
            self._deadline, self._place = now + _UNWIND_S, place
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif now > self._deadline - (_UNWIND_S - _SETTLE_S if place == self._place else 0.0):
            interruption.end_process(EXIT_STATUS)

    def _print_verdict(self) -> None:
        """Print the verdict once."""
        if self._verdict is not None and not self._is_printed:
            self._is_printed = True
            interruption.print_stderr(CommplanError(self._verdict.diagnostic))
            self._settled.set()


def _state(calls: Calls, process: int) -> str:
    """The state of another process of this host, see `process_state`; `unknown` on another host."""
    with contextlib.suppress(OSError):
        if calls.recording is not None and (number := writer(path_of(calls.recording.job, process))[0]):
            return process_state(number)
    return "unknown"


_running: list[Watchdog] = []  # At most one. A forked child has none.
os.register_at_fork(after_in_child=_running.clear)


def start(
    index: int, job: str, exchange: Callable[[Peer], Mapping[int, Peer]], limits: HangLimits, plan: str
) -> Calls | None:
    """Watch the calls of processes that bind the same plan; all of them call this.

    Args:
        index: The number of this process.
        job: The name of the job, the same on all processes.
        exchange: Returns the messages of all processes, by number, if all of them call it.
        limits: The limits of the waits of this process. The most patient limits of all processes apply.
        plan: The name of the plan, for the record; "" for a step without one.

    Returns:
        The counter of calls, or None if one of the processes disables the watchdog.
    """
    peers = exchange(Peer(limits))
    limits = most_patient([peer.limits for peer in peers.values()])
    if limits.watchdog_s is None:
        return None
    if not _running:
        _running.append(Watchdog(index))
    calls, address = _running[0].watch(index, job, sorted(peers), limits, plan)
    addresses = {number: peer.sidecar for number, peer in exchange(Peer(limits, address)).items()}
    if calls.recording is not None:
        introduce_hosts(calls.recording.path, index, addresses)
    return calls


def watch_subset(whole: Calls | None, processes: Sequence[int], plan: str) -> Calls | None:
    """Watch the calls of some of the processes of `whole`, with the same limits.

    Args:
        whole: The calls of all processes, or None if they are not watched.
        processes: The numbers of the processes.
        plan: The name of the plan, for the record.

    Returns:
        The counter of calls. None if `whole` is None, for a single process, and if this is none of them.
    """
    if whole is None or len(processes) == 1 or not _running or _running[0].number not in processes:
        return None
    watched = _running[0].watched[whole.key]
    return _running[0].watch(watched.number, watched.job, processes, watched.limits, plan)[0]
