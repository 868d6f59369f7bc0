"""The server process: a loop that receives messages and passes them to the driver, or sleeps."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from commplan.diagnostics import CommplanError, fail, plural
from commplan.ir.types import sized, timed
from commplan.lowering.mpi.job.release import drop
from commplan.lowering.mpi.job.watchdog import RequestWatch
from commplan.lowering.mpi.shared import HELLO
from commplan.protocol.sites import LEAVE, LEFT, Sites
from commplan.recorder.lane import Lane
from commplan.runtime.context import Context
from commplan.runtime.observe.abort_hook import mark_reported
from commplan.runtime.param_server import event_log as recordings
from commplan.runtime.param_server.checkpoint import ServerCheckpoint, check_prompt
from commplan.runtime.param_server.driver import ServerDriver
from commplan.runtime.param_server.event_log import LOST, Recorder, Replay, read_events
from commplan.runtime.param_server.mailbox import Mail, Mailbox
from commplan.runtime.param_server.routing import RoutingTable
from commplan.runtime.param_server.serve_record import ServeRecord
from commplan.runtime.param_server.shared import SharedStates, uses_shared_memory
from commplan.runtime.param_server.startup_guard import begin_serving, end_serving
from commplan.runtime.param_server.store import Pool

if TYPE_CHECKING:
    from commplan.runtime.machines.server import ServerRank

ABORT = 3  # The tag of a message with the reason that a server ends.
DEATH = 4  # The tag of messages between servers that a replay has reached a worker's death.
_LEAVES = "OMPI_MCA_async_mpi_finalize"  # Set by `mpirun --mca`: whether MPI_Finalize ignores dead ranks.
_SPIN_S = 200e-6  # Seconds without a message before the first sleep.
_NAP_S = 50e-6  # Seconds of the first sleep. Each is twice as long as the one before.
_BUSY_NAP_S = 200e-6  # Seconds of the longest sleep while messages are in flight.
_IDLE_NAP_S = 1e-3  # Seconds of the longest sleep otherwise.
_REPORT_S = 0.25  # Seconds between two reports to the sidecar.
_CHECK_S = 1.0  # Seconds between two checks for workers that a put waits for.
_LATE_S = 30.0  # Seconds until these workers are named.
_LEAVE_S = 5.0  # Seconds for sending the last answers.
_MOST_REASON = 4000  # The most bytes of a reason that workers receive.


@dataclass(frozen=True)
class Served:
    """The statistics of a server, after all workers have left.

    Attributes:
        name: The name of the server.
        requests: The number of received requests, by worker.
        messages: The number of received messages, by worker.
        nbytes: The received bytes, by worker.
        answered: The bytes that the server sent.
        updates: The number of updates of units.
        lost: The workers that died.
        broken_off: For each worker that ended with an error, its message.
        busy_s: Wall seconds with work.
        waiting_s: Wall seconds without work.
        cpu_s: CPU seconds of the process since its start, user and system.
        memory: The maximum of resident bytes of the process.
        restored: Whether states came from a checkpoint.
        shared: The number of requests that workers on this host carried out in shared memory.
    """

    name: str
    requests: dict[int, int]
    messages: dict[int, int]
    nbytes: dict[int, int]
    answered: int
    updates: int
    lost: tuple[int, ...]
    broken_off: dict[int, str]
    busy_s: float
    waiting_s: float
    cpu_s: float
    memory: int
    restored: bool = False
    shared: int = 0

    def __str__(self) -> str:
        requests = sum(self.requests.values())
        workers = len(self.requests)
        seconds = f"busy {timed(self.busy_s)} of {timed(self.busy_s + self.waiting_s)}"
        received = sized(sum(self.nbytes.values()))
        sent = sized(self.answered)
        lost = f", {plural(len(self.lost), 'worker')} died" if self.lost else ""
        return (
            f"{self.name}: {plural(requests, 'request')} of {plural(workers, 'worker')}, "
            f"{received} in, {sent} out, {seconds}{lost}"
        )


class ServeOptions(NamedTuple):
    """Options of a server.

    Attributes:
        checkpoint: A folder for states that survive the process. States of an earlier run of the plan in this
            folder are restored. Every update is in the checkpoint before it is answered, so `staleness` is
            not possible. None for no checkpoint.
        every_s: Seconds between two calls of fsync, so that states also survive the machine; None for none.
        record: A file that receives the order of requests, or None. If the plan has several servers, the
            number of the server is added to the file name, here and for `replay`.
        replay: A recording, or None. Requests are served in its order, which reproduces the weights.
        stop: An event, or a function that returns a boolean. The server ends early when it is true. None
            to serve until all workers have left.
        timeout: Seconds for setting a state again, which waits until all workers have reached that line or
            left.
    """

    checkpoint: str | os.PathLike[str] | None = None
    every_s: float | None = None
    record: str | os.PathLike[str] | None = None
    replay: str | os.PathLike[str] | None = None
    stop: threading.Event | Callable[[], bool] | None = None
    timeout: float = 1800.0

    def check(self) -> None:
        """Raise CP0980 for options that exclude each other, and for an invalid `every_s`."""
        if self.record is not None and self.replay is not None:
            fail("CP0980", "a run cannot be recorded and replayed at once", "a replay has the recorded order")
        if self.every_s is not None and (self.checkpoint is None or not self.every_s > 0):
            message = "there is no checkpoint" if self.checkpoint is None else "seconds must be positive"
            example = "for example checkpoint=FOLDER, every_s=60"
            fail("CP0980", f"every_s is {self.every_s!r}, but {message}", example)

    @property
    def can_share(self) -> bool:
        """Whether workers may update the states in shared memory, without requests."""
        return self.checkpoint is None and self.record is None and self.replay is None


def serve(context: Context, server: ServerRank, options: ServeOptions) -> Served:
    """Serve until every worker has left or died, or until `options.stop` is true.

    Args:
        context: The bound program.
        server: This server.
        options: Checkpoints, recordings and limits.

    Returns:
        The statistics of the server.

    Raises:
        CommplanError: CP0970, CP0971, CP0972 for a function that cannot update chunks. CP0973 to CP0975 for a
            checkpoint of another plan, one that cannot be used, and a start with restored states. CP0976,
            CP0977 for a recording that is invalid, or that differs from the run. CP0978 if the server cannot
            continue or has served before; CP0979 for messages of another program; CP0980 for options that
            exclude each other; CP0981 if a state is not set again in time; the verdict of the sidecar, such
            as CP0834. The workers receive the reason, unless the server has served before.
    """
    file = context.schedule.file
    begin_serving(server.service, server.name)
    pool, sites = Pool(), server.sites
    mailbox = Mailbox(server.service, sites.workers, pool)
    try:
        options.check()
        if options.checkpoint is not None:
            check_prompt(sites, file)
        routing = RoutingTable(context.schedule, sites, server.number, context.functions, context.structures)
        driver = ServerDriver(sites, server.number, routing, mailbox.send, pool)
        if server.watch is not None and server.watch.recording is not None:
            lane = Lane(server.watch.recording)
            driver.record = ServeRecord(lane, routing.sites.values(), file)
        with contextlib.ExitStack() as closing:
            loop = ServerLoop(driver, mailbox, server.name, options.stop, options.timeout, server.watch)
            if options.checkpoint is not None:
                folder = Path(options.checkpoint)
                _use_checkpoint(loop, folder, server.number, options.every_s, closing)
            if options.record is not None:
                path = _recording_path(Path(options.record), server)
                loop.recorder = Recorder(path, recordings.log_header(sites, server.number))
                closing.callback(loop.recorder.close)
            if options.replay is not None:
                path = _recording_path(Path(options.replay), server)
                loop.follow(read_events(path, recordings.log_header(sites, server.number)))
            if uses_shared_memory(sites):
                _offer_shared_memory(loop, closing, share=options.can_share)
            served = loop.run()
    except BaseException as error:
        reason = end_reason(error)
        if server.watch is None or not server.watch.verdict():  # All ranks receive a verdict.
            send_abort(mailbox, sites, reason)
        mark_reported(error)
        raise
    if driver.all_departed:
        end_serving(server.service)
        for worker in range(sites.workers):
            mailbox.send(worker, LEFT, np.empty(0, np.uint8))
        finish(mailbox)
        if not (mailbox.is_busy or loop.lost or mailbox.broken):
            drop(server)
    return served


def end_reason(error: BaseException) -> str:
    """The reason that workers receive if `error` ends their server."""
    if isinstance(error, CommplanError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"its program ended, by sys.exit({error.args[0] if error.args else ''})"
    return f"{type(error).__name__}: {error}"


def _recording_path(path: Path, server: ServerRank) -> Path:
    """The file of this server's recording; `path` with the number of the server if there are several."""
    if server.sites.servers == 1:
        return path
    return path.with_name(f"{path.stem}.server-{server.number}{path.suffix}")


def _use_checkpoint(
    loop: ServerLoop, folder: Path, server: int, every_s: float | None, closing: contextlib.ExitStack
) -> None:
    """Restore the states from the checkpoint in `folder`, if there is one, and write updates to it."""
    driver = loop.driver
    checkpoint = ServerCheckpoint(folder, driver.store, server, every_s)
    closing.callback(checkpoint.close)
    pairs = dict.fromkeys(
        (site.states[0], site.states[1]) for site in driver.sites.all if len(site.states) > 1
    )
    if checkpoint.existed and checkpoint.load(list(pairs)):
        driver.restore()
        if driver.restored:
            loop.log(f"continues with the states of {str(checkpoint.path)!r}")
    driver.checkpoint = checkpoint


def _offer_shared_memory(loop: ServerLoop, closing: contextlib.ExitStack, *, share: bool) -> None:
    """Send the workers an offer of the memory of the states, which is empty if it is not shared."""
    driver = loop.driver
    offer = None
    if share:
        loop.shared = SharedStates(driver.sites, driver.store)
        closing.callback(loop.shared.close)
        driver.on_set = loop.shared.update_counts
        offer = loop.shared.offer()
    _send_offer(loop.mailbox, driver.sites.workers, offer)


def _send_offer(mailbox: Mailbox, workers: int, offer: bytes | None = None) -> None:
    """Send the workers `offer`, or an empty offer for None: states are not shared."""
    offer = offer or json.dumps({"host": socket.gethostname(), "shared": {}}).encode()
    for worker in range(workers):
        mailbox.send(worker, HELLO, np.frombuffer(offer, np.uint8))


def send_abort(mailbox: Mailbox, sites: Sites, reason: str) -> None:
    """Send the workers the reason that this server ends."""
    text = np.frombuffer(reason.encode()[:_MOST_REASON], np.uint8)
    for worker in range(sites.workers):
        mailbox.send(worker, ABORT, text)
    if uses_shared_memory(sites):
        # A worker that still waits for the offer continues, and receives the reason.
        _send_offer(mailbox, sites.workers)
    finish(mailbox)


def finish(mailbox: Mailbox) -> None:
    """Wait for messages in flight, but not longer than `_LEAVE_S`. Discards received ones."""
    deadline = time.monotonic() + _LEAVE_S
    while mailbox.is_busy and time.monotonic() < deadline:
        mailbox.poll()
        time.sleep(_NAP_S)


class PutTimeout:
    """The time limit for setting a state again, which waits for all workers that have not left or died.

    Args:
        driver: The driver of the server.
        timeout: The limit in seconds.
    """

    def __init__(self, driver: ServerDriver, timeout: float) -> None:
        self._driver, self._timeout = driver, timeout
        self._checked = time.monotonic()  # The time of the last check.
        # By site and workers that it waits for, the time at which the wait was found; at most one.
        self._since: dict[tuple[int, tuple[int, ...]], float] = {}
        self._reported = False  # Whether this wait was reported.

    def message(self) -> str:
        """A message for the log about a long wait, once for each wait; else "".

        The server calls this regularly. Raises CP0981 after the timeout.
        """
        now = time.monotonic()
        if now - self._checked < min(_CHECK_S, self._timeout):
            return ""
        self._checked = now
        pending = self._driver.machine.blocked_put()
        if pending is None:
            self._since.clear()
            return ""
        site, workers = pending
        key = (site.number, tuple(workers))
        if key not in self._since:
            self._since, self._reported = {key: now}, False
        waited, file = now - self._since[key], self._driver.routing.schedule.file
        names = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
        if waited >= self._timeout:
            fail(
                "CP0981",
                f"`{site.states[0]}` is set again, but {names} did not reach that line in {waited:.0f} s",
                "all workers must call the phase that sets it equally often; workers that are not needed"
                " leave with run.close()",
                "run.serve(timeout=SECONDS) waits longer",
                span=site.span,
                file=file,
            )
        if waited < _LATE_S or self._reported:
            return ""
        self._reported = True
        return f"line {site.span.line} of {file or 'the plan'} sets `{site.states[0]}`, and waits for {names}"


class ServerLoop:
    """The main loop of a server.

    Attributes:
        lost: The workers that died, in order.
        broken_off: See `Served`.
        busy: Wall seconds with work.
        waiting: Wall seconds without work.
        recorder: The recording that is written, or None.
        shared: The states in shared memory, or None.
    """

    def __init__(
        self, driver: ServerDriver, mailbox: Mailbox, name: str,
        stop: threading.Event | Callable[[], bool] | None = None, timeout: float = 1800.0,
        watch: RequestWatch | None = None,
    ) -> None:  # fmt: skip
        self.driver, self.mailbox, self.name = driver, mailbox, name
        self._watch = watch
        self._last_report_s = 0.0
        self._has_progressed = True  # Since the last report to the sidecar.
        self._put_timeout = PutTimeout(driver, timeout)
        self.stop = stop.is_set if isinstance(stop, threading.Event) else stop
        self.lost: list[int] = []
        self.broken_off: dict[int, str] = {}
        self.busy = self.waiting = 0.0
        self.recorder: Recorder | None = None
        self.shared: SharedStates | None = None
        self._replay: Replay | None = None
        # For each worker, the number of servers whose replay has reached its death.
        self._deaths: Counter[int] = Counter()
        self._began = time.monotonic()

    def run(self) -> Served:
        """Serve until every worker has left or died, or until `stop` is true."""
        while not self.driver.all_departed and not (self.stop is not None and self.stop()):
            self._step()
            if self.mailbox.broken:
                fail("CP0978", self.mailbox.broken, "the servers cannot continue")
        finish(self.mailbox)
        return self.served()

    def follow(self, events: Iterator[tuple[int, int]]) -> None:
        """Serve in the order of a recording."""
        self._replay = Replay(events, self.driver.arrive, self._replay_death)

    def _replay_death(self, worker: int) -> None:
        """Handle a death of the recording, and report it to the other servers."""
        self._remove(worker)
        sites, number = self.driver.sites, self.driver.machine.server
        for server in range(sites.servers):
            if server != number:
                self.mailbox.send(sites.workers + server, DEATH, np.array([worker], np.int64))
        self._count_death(worker)

    def _count_death(self, worker: int) -> None:
        """Count the servers whose replay has reached the death of a worker. The last one ends the worker.

        The worker lives in this run. Until then, servers may need messages that it had sent before it died.
        """
        self._deaths[worker] += 1
        if self._deaths[worker] == self.driver.sites.servers:
            reason = b"this worker died here when the run was recorded"
            self.mailbox.send(worker, ABORT, np.frombuffer(reason, np.uint8))

    def served(self) -> Served:
        """The statistics so far."""
        counters, usage = self.driver.counters, resource.getrusage(resource.RUSAGE_SELF)
        shared = self.shared.requests if self.shared is not None else 0
        return Served(
            self.name, counters.requests, counters.messages, counters.nbytes, counters.answered,
            counters.updates, tuple(self.lost), self.broken_off, self.busy, self.waiting,
            usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, self.driver.restored, shared,
        )  # fmt: skip

    def _step(self) -> None:
        """Wait for messages and handle them."""
        begun = time.perf_counter()
        mail, lost = self._wait(begun)
        now = time.perf_counter()
        self.waiting += now - begun
        self._has_progressed |= bool(mail)
        for message in mail:
            self._handle(message)
        for worker in lost:
            if self._replay is not None:
                self._replay.died(worker)
                continue
            if self.recorder is not None:
                self.recorder.add(worker, LOST)
                self.recorder.flush()
            self._remove(worker)
        self.busy += time.perf_counter() - now

    def _wait(self, begun: float) -> tuple[list[Mail], list[int]]:
        """Wait until there are messages, or until `stop` is true; first spin, then sleep longer and longer.

        Returns:
            The messages, and the workers that have died.
        """
        nap = 0.0
        while True:
            mail, lost = self.mailbox.poll(), self.mailbox.take_lost()
            now = time.perf_counter()
            if now - self._last_report_s >= _REPORT_S:
                self._last_report_s = now
                self._report()
            if mail or lost or self.mailbox.broken:
                return mail, lost
            if now - begun < _SPIN_S:
                continue
            if nap >= _BUSY_NAP_S and self.stop is not None and self.stop():
                return [], []
            if text := self._put_timeout.message():
                self.log(text)
            longest = _BUSY_NAP_S if self.mailbox.is_busy else _IDLE_NAP_S
            nap = min(2 * nap or _NAP_S, longest)
            if self.recorder is not None and nap >= _IDLE_NAP_S:
                self.recorder.flush()
            time.sleep(nap)

    def _report(self) -> None:
        """Report the state of this server to the sidecar. Raises its verdict, if there is one."""
        if self._watch is None:
            return
        if (verdict := self._watch.verdict()) is not None:
            fail(verdict.code, verdict.message, *verdict.notes)
        machine = self.driver.machine
        waiting, blocking = machine.blocked_workers()
        if self.driver.record is not None and waiting:
            self.driver.record.waits(blocking)
        self._watch.serve(
            waits=bool(waiting), patient=machine.blocked_put() is not None, moved=self._has_progressed
        )
        self._has_progressed = False

    def _handle(self, mail: Mail) -> None:
        """Handle a message of a worker or of another server."""
        if mail.worker >= self.driver.sites.workers:
            self._count_death(int(mail.buffer.view(np.int64)[0]))
            return
        if mail.tag == LEAVE and mail.buffer.size:
            reason = mail.buffer.tobytes().decode(errors="replace")
            self.broken_off[mail.worker] = reason
            self.log(f"worker {mail.worker} ended with an error: {reason}")
        if self._replay is not None:
            self._replay.arrive(*mail)
            return
        if self.recorder is not None:
            self.recorder.add(mail.worker, mail.tag)
        self.driver.arrive(*mail)

    def _remove(self, worker: int) -> None:
        """Handle the death of a worker, unless it has left or died before."""
        if worker in self.driver.machine.departed:
            return
        self.lost.append(worker)
        requests = self.driver.counters.requests.get(worker, 0)
        living = self.driver.sites.workers - len(self.driver.machine.departed) - 1
        self.log(f"worker {worker} died after {requests} requests; {living} workers continue")
        if os.environ.get(_LEAVES, "0") == "0" and len(self.lost) == 1:
            self.log("without `mpirun --mca async_mpi_finalize 1` the job may wait for dead ranks at its end")
        self.driver.lost(worker)

    def log(self, event: str) -> None:
        """Write one line to stderr."""
        text = f"commplan: {self.name}: {event} ({time.monotonic() - self._began:.1f} s)\n"
        os.write(2, text.encode())  # In one call, so that lines of different ranks are not mixed.
