"""The server process: it takes what comes, does what the protocol says, and waits without cost."""

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
from typing import Protocol

import numpy as np

from commplan.diagnostics import CommplanError, fail
from commplan.ir.types import sized, timed
from commplan.lowering.mpi.job.watchdog import RequestWatch
from commplan.lowering.mpi.shared import HELLO
from commplan.protocol.sites import LEAVE, Sites
from commplan.recorder.lane import Lane
from commplan.runtime.context import Context
from commplan.runtime.observe.abort_hook import told
from commplan.runtime.param_server import event_log as recordings
from commplan.runtime.param_server.checkpoint import Keep, check_prompt
from commplan.runtime.param_server.driver import Driver
from commplan.runtime.param_server.event_log import LOST, Recorder, Replay, recorded
from commplan.runtime.param_server.mailbox import Mail, Post
from commplan.runtime.param_server.routing import Desks
from commplan.runtime.param_server.serve_record import ServeRecord
from commplan.runtime.param_server.server_rank import Serving as Server
from commplan.runtime.param_server.shared import Shared, offered
from commplan.runtime.param_server.startup_guard import attended, left
from commplan.runtime.param_server.store import Array, Pool

SORRY = 3  # the tag under which a server says that it gives up, and why
GONE = 4  # and under which servers tell each other that a replay has come to a worker's death
_LEAVES = "OMPI_MCA_async_mpi_finalize"  # set by `mpirun --mca`: whether MPI's end leaves the dead alone
_SPIN_S = 200e-6  # seconds without a message before the first sleep
_NAP_S = 50e-6  # of the first sleep; each is twice as long as the one before
_BUSY_NAP_S, _IDLE_NAP_S = 200e-6, 1e-3  # of the longest one, while something is on its way, and else
_REPORT_S = 0.25  # seconds between two reports to the watch
_LOOK_S = 1.0  # seconds between two looks at workers that a state which is set again waits for
_SAY_S = 30.0  # and until they are named
_GOODBYE_S = 5.0  # for the last answers to go out


class Posting(Protocol):
    """How messages come and go."""

    broken: str

    @property
    def busy(self) -> bool: ...
    def poll(self) -> list[Mail]: ...
    def send(self, worker: int, tag: int, array: Array) -> None: ...
    def take_lost(self) -> list[int]: ...


@dataclass(frozen=True)
class Served:
    """What a server has done when all workers have left.

    requests, messages, nbytes: by worker, what it asked, in how many messages of how many bytes in all.
    answered: bytes that went out. updates: units updated. lost: workers that died; broken_off: why workers
    left that did not leave in order. busy_s, waiting_s: wall seconds with and without something to do;
    cpu_s: user and system. memory: the most bytes that were resident. restored: whether states came from a
    checkpoint. shared: requests that workers of this host served themselves, in shared memory.
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
        asked, workers = sum(self.requests.values()), len(self.requests)
        came, went = sized(sum(self.nbytes.values())), sized(self.answered)
        lost = f", {len(self.lost)} worker{'s' * (len(self.lost) != 1)} died" if self.lost else ""
        return (
            f"{self.name}: {asked} request{'s' * (asked != 1)} of {workers} worker{'s' * (workers != 1)}, "
            f"{came} in, {went} out, busy {timed(self.busy_s)} of {timed(self.busy_s + self.waiting_s)}{lost}"
        )


def serve(
    context: Context,
    server: Server,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    every_s: float | None = None,
    record: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    stop: threading.Event | Callable[[], bool] | None = None,
    timeout: float = 1800.0,
) -> Served:
    """Serve as `server` until every worker has left or died. context: of the program that is bound.

    checkpoint: a folder where states outlive the process; what an earlier run of the plan left there is gone
    on with. No exchange is answered before it is applied and kept then: there is no `staleness` beside it.
    every_s: seconds between two times that it is forced to the disk, for what outlives the machine.
    record: a file for the order in which requests come; replay: one whose order is kept again, which gives
    the same weights. Where the plan has several servers, their numbers are put into the files' names. stop:
    ends the serving early when it is set, or returns True. timeout: seconds that a state which is set again
    may wait for workers that do not come to that line and have not left.

    Raises `CommplanError`: CP0970, CP0971, CP0972 for a function that cannot update chunks; CP0973 to CP0975
    for a checkpoint of another plan, one that cannot be used, and a start on top of it; CP0976, CP0977 for a
    recording that cannot be used, or is not what happens; CP0978 where nothing more can be served, CP0979 for
    messages of another program, CP0980 for options that exclude each other. Workers are told why.
    """
    attended(server.service, server.name)
    pool, sites = Pool(), server.sites
    post = Post(server.service, sites.workers, pool)
    try:
        _check(checkpoint, every_s, record, replay)
        if checkpoint is not None:
            check_prompt(sites, server.file)
        desks = Desks(context.schedule, sites, server.number, context.functions, context.structures)
        driver = Driver(sites, server.number, desks, post.send, pool)
        if server.watch is not None and server.watch.recording is not None:
            lane = Lane(server.watch.recording)
            driver.record = ServeRecord(lane, desks.all.values(), context.schedule.file)
        with contextlib.ExitStack() as closing:
            serving = ServerLoop(driver, post, server.name, stop, timeout, server.watch)
            if checkpoint is not None:
                _keep(serving, Path(checkpoint), server.number, every_s, closing)
            if record is not None:
                path = _numbered(Path(record), server)
                serving.recorder = Recorder(path, recordings.about(sites, server.number))
                closing.callback(serving.recorder.close)
            if replay is not None:
                path = _numbered(Path(replay), server)
                serving.follow(recorded(path, recordings.about(sites, server.number)))
            if offered(sites):
                plain = checkpoint is None and record is None and replay is None
                _offer(serving, closing, share=plain)
            served = serving.run()
    except BaseException as error:
        why = end_reason(error)
        if server.watch is None or not server.watch.verdict():  # which all have heard
            apologize(post, sites, why)
        told(error)
        raise
    if driver.over:
        left(server.service)
    return served


def end_reason(error: BaseException) -> str:
    """What the workers hear of what ends their server."""
    if isinstance(error, CommplanError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"its program ended, by sys.exit({error.args[0] if error.args else ''})"
    return f"{type(error).__name__}: {error}"


def _check(checkpoint: object, every_s: float | None, record: object, replay: object) -> None:
    if record is not None and replay is not None:
        fail("CP0980", "a run is recorded or replayed, not both", "a replay has the order of its recording")
    if every_s is not None and (checkpoint is None or not every_s > 0):
        message = "there is no checkpoint" if checkpoint is None else "seconds are more than 0"
        fail("CP0980", f"every_s is {every_s!r}, and {message}", "such as checkpoint=FOLDER, every_s=60")


def _numbered(path: Path, server: Server) -> Path:
    if server.sites.servers == 1:
        return path
    return path.with_name(f"{path.stem}.server-{server.number}{path.suffix}")


def _keep(
    serving: ServerLoop, folder: Path, server: int, every_s: float | None, closing: contextlib.ExitStack
) -> None:
    driver = serving.driver
    keep = Keep(folder, driver.store, server, every_s)
    closing.callback(keep.close)
    pairs = [site.states[:2] for site in driver.sites.all if len(site.states) > 1]
    if keep.found and keep.load([(first, second) for first, second in dict.fromkeys(pairs)]):
        driver.restore()
        if driver.restored:
            serving.say(f"goes on with the states of {str(keep.path)!r}")
    driver.keeper = keep


def _offer(serving: ServerLoop, closing: contextlib.ExitStack, *, share: bool) -> None:
    """Tell workers of the memory that they see too, or that there is none."""
    driver = serving.driver
    word = None
    if share:
        serving.shared = Shared(driver.sites, driver.store)
        closing.callback(serving.shared.close)
        driver.published = serving.shared.published
        word = serving.shared.hello()
    _greet(serving.post, driver.sites.workers, word)


def _greet(post: Posting, workers: int, word: bytes | None = None) -> None:
    word = word or json.dumps({"host": socket.gethostname(), "shared": {}}).encode()
    for worker in range(workers):
        post.send(worker, HELLO, np.frombuffer(word, np.uint8))


def apologize(post: Posting, sites: Sites, why: str) -> None:
    """Tell the workers why nothing more comes."""
    text = np.frombuffer(why.encode()[:4000], np.uint8)
    for worker in range(sites.workers):
        post.send(worker, SORRY, text)
    if offered(sites):  # one that still waits for the memory goes on, and finds the word
        _greet(post, sites.workers)
    finish(post)


def finish(post: Posting) -> None:
    """Wait for what is on its way, for a while."""
    until = time.monotonic() + _GOODBYE_S
    while post.busy and time.monotonic() < until:
        post.poll()
        time.sleep(_NAP_S)


class Awaited:
    """A state that is set again waits for every worker: this says for whom, and not for ever.

    timeout: seconds that a put may wait. Workers that left or died are not waited for."""

    def __init__(self, driver: Driver, timeout: float) -> None:
        self._driver, self._timeout = driver, timeout
        self._looked = time.monotonic()
        self._since: dict[tuple[int, tuple[int, ...]], float] = {}
        self._said = False

    def word(self) -> str:
        """What to say now, mostly nothing. Raises CP0981 where it has been too long."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_S, self._timeout):
            return ""
        self._looked = now
        awaited = self._driver.machine.awaited()
        if awaited is None:
            self._since.clear()
            return ""
        site, workers = awaited
        key = (site.number, tuple(workers))
        if key not in self._since:
            self._since, self._said = {key: now}, False
        waited, file = now - self._since[key], self._driver.desks.schedule.file
        named = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
        if waited >= self._timeout:
            fail(
                "CP0981",
                f"`{site.states[0]}` is set again, and {named} did not come to that line in {waited:.0f} s",
                "all workers call the phase that sets it as often as the first one; spare ones leave with"
                " run.close()",
                "run.serve(timeout=SECONDS) waits longer",
                span=site.span,
                file=file,
            )
        if waited < _SAY_S or self._said:
            return ""
        self._said = True
        return f"line {site.span.line} of {file or 'the plan'} sets `{site.states[0]}`, and waits for {named}"


class ServerLoop:
    """The loop of a server."""

    def __init__(
        self,
        driver: Driver,
        post: Posting,
        name: str,
        stop: threading.Event | Callable[[], bool] | None = None,
        timeout: float = 1800.0,
        watch: RequestWatch | None = None,
    ) -> None:
        self._watch, self._reported, self._moved = watch, 0.0, True
        self.driver, self.post, self.name = driver, post, name
        self._awaited = Awaited(driver, timeout)
        self.stop = stop.is_set if isinstance(stop, threading.Event) else stop
        self.lost: list[int] = []
        self.broken_off: dict[int, str] = {}
        self.busy = self.waiting = 0.0
        self.recorder: Recorder | None = None
        self.shared: Shared | None = None
        self._replay: Replay | None = None
        self._deaths: Counter[int] = Counter()  # by worker, servers whose replay has come to its death
        self._began = time.monotonic()

    def run(self) -> Served:
        """Until every worker has left or died."""
        while not self.driver.over and not (self.stop is not None and self.stop()):
            self._turn()
            if self.post.broken:
                fail("CP0978", self.post.broken, "the servers cannot go on")
        finish(self.post)
        return self.served()

    def follow(self, events: Iterator[tuple[int, int]]) -> None:
        """Serve in the order of a recording."""
        self._replay = Replay(events, self.driver.arrive, self._died_then)

    def _died_then(self, worker: int) -> None:
        self._lose(worker)
        sites, own = self.driver.sites, self.driver.machine.server
        for server in range(sites.servers):
            if server != own:
                self.post.send(sites.workers + server, GONE, np.array([worker], np.int64))
        self._heard_of(worker)

    def _heard_of(self, worker: int) -> None:
        """A server has come to a worker's death. When all have, the worker, which lives this time, is told.

        Until then it may owe some of them what it had sent when it died.
        """
        self._deaths[worker] += 1
        if self._deaths[worker] == self.driver.sites.servers:
            word = b"this worker died here when the run was recorded"
            self.post.send(worker, SORRY, np.frombuffer(word, np.uint8))

    def served(self) -> Served:
        """What has been done so far."""
        seen, usage = self.driver.seen, resource.getrusage(resource.RUSAGE_SELF)
        shared = self.shared.requests if self.shared is not None else 0
        return Served(
            self.name, seen.requests, seen.messages, seen.nbytes, seen.answered, seen.updates,
            tuple(self.lost), self.broken_off, self.busy, self.waiting, usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss * 1024, self.driver.restored, shared,
        )  # fmt: skip

    def _turn(self) -> None:
        """Wait for something, and deal with it."""
        since, nap = time.perf_counter(), 0.0
        while True:
            mail, lost = self.post.poll(), self.post.take_lost()
            now = time.perf_counter()
            if now - self._reported >= _REPORT_S:
                self._reported = now
                self._report()
            if mail or lost or self.post.broken:
                break
            if now - since < _SPIN_S:
                continue
            if nap >= _BUSY_NAP_S and self.stop is not None and self.stop():
                self.waiting += now - since
                return
            if word := self._awaited.word():
                self.say(word)
            most = _BUSY_NAP_S if self.post.busy else _IDLE_NAP_S
            nap = min(2 * nap or _NAP_S, most)
            if self.recorder is not None and nap >= _IDLE_NAP_S:
                self.recorder.flush()
            time.sleep(nap)
        self.waiting += now - since
        self._moved |= bool(mail)
        for letter in mail:
            self._deal(letter)
        for worker in lost:
            if self._replay is not None:
                self._replay.died(worker)
                continue
            if self.recorder is not None:
                self.recorder.add(worker, LOST)
                self.recorder.flush()
            self._lose(worker)
        self.busy += time.perf_counter() - now

    def _report(self) -> None:
        """Say to the watch how this server is. Raises CP0834 where it knows who holds the others."""
        if self._watch is None:
            return
        if verdict := self._watch.verdict():
            fail("CP0834", *(line.removeprefix("note: ") for line in verdict.splitlines()))
        sites, machine = self.driver.sites, self.driver.machine
        waiting, others = machine.held()
        if self.driver.record is not None and waiting:
            self.driver.record.waits(others)
        servers = (sites.workers + server for server in range(sites.servers) if server != machine.server)
        gone = [*machine.gone, *servers]
        self._watch.serve(
            waits=bool(waiting), patient=machine.awaited() is not None, moved=self._moved, awaited=others,
            gone=gone,
        )  # fmt: skip
        self._moved = False

    def _deal(self, mail: Mail) -> None:
        if mail.worker >= self.driver.sites.workers:
            self._heard_of(int(mail.buffer.view(np.int64)[0]))
            return
        if mail.tag == LEAVE and mail.buffer.size:
            why = mail.buffer.tobytes().decode(errors="replace")
            self.broken_off[mail.worker] = why
            self.say(f"worker {mail.worker} gives up: {why}")
        if self._replay is not None:
            self._replay.arrive(*mail)
            return
        if self.recorder is not None:
            self.recorder.add(mail.worker, mail.tag)
        self.driver.arrive(*mail)

    def _lose(self, worker: int) -> None:
        if worker in self.driver.machine.gone:
            return
        self.lost.append(worker)
        asked = self.driver.seen.requests.get(worker, 0)
        living = self.driver.sites.workers - len(self.driver.machine.gone) - 1
        self.say(f"worker {worker} died after {asked} requests; {living} workers go on")
        if os.environ.get(_LEAVES, "0") == "0" and len(self.lost) == 1:
            self.say("without `mpirun --mca async_mpi_finalize 1` the job may wait for the dead when it ends")
        self.driver.lost(worker)

    def say(self, event: str) -> None:
        """One line to whoever watches the job."""
        text = f"commplan: {self.name}: {event} ({time.monotonic() - self._began:.1f} s)\n"
        os.write(2, text.encode())  # in one piece, among those of other ranks
