"""The server process: it takes what comes, does what the protocol says, and waits without cost."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from commplan.diagnostics import CommplanError, fail
from commplan.protocol.sites import LEAVE
from commplan.runtime.exchange.desk import Desks
from commplan.runtime.exchange.driver import Driver
from commplan.runtime.exchange.post_mpi import Mail, Post
from commplan.runtime.exchange.store import Array, Pool
from commplan.runtime.serving import ServerContext

SORRY = 3  # the tag under which a server says that it gives up, and why
_SPIN_S = 200e-6  # seconds without a message before the first sleep
_NAP_S = 50e-6  # of the first sleep; each is twice as long as the one before
_BUSY_NAP_S, _IDLE_NAP_S = 200e-6, 1e-3  # of the longest one, while something is on its way, and else
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
    checkpoint.
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

    def __str__(self) -> str:
        came, asked = sum(self.nbytes.values()), sum(self.requests.values())
        lost = f", {len(self.lost)} workers died" if self.lost else ""
        return (
            f"{self.name}: {asked} requests of {len(self.requests)} workers, {came} bytes in, "
            f"{self.answered} out, busy {self.busy_s:.1f} s of {self.busy_s + self.waiting_s:.1f}{lost}"
        )


def serve(
    context: ServerContext,
    *,
    stop: threading.Event | Callable[[], bool] | None = None,
) -> Served:
    """Serve until every worker has left or died.

    stop: ends the serving early when it is set, or returns True.

    Raises `CommplanError`: CP0970, CP0971, CP0972 for a function that cannot update chunks, CP0978 where
    nothing more can be served, CP0979 for messages of another program. Workers are told why.
    """
    pool = Pool()
    post = Post(context.comm, context.sites.workers, pool)
    desks = Desks(context.schedule, context.sites, context.server, context.functions, context.structures)
    driver = Driver(context.sites, context.server, desks, post.send, pool)
    return Serving(driver, post, context.name, stop).run()


class Serving:
    """The loop of a server."""

    def __init__(
        self,
        driver: Driver,
        post: Posting,
        name: str,
        stop: threading.Event | Callable[[], bool] | None = None,
    ) -> None:
        self.driver, self.post, self.name = driver, post, name
        self.stop = stop.is_set if isinstance(stop, threading.Event) else stop
        self.lost: list[int] = []
        self.broken_off: dict[int, str] = {}
        self.busy = self.waiting = 0.0
        self._began = time.monotonic()

    def run(self) -> Served:
        """Until every worker has left or died."""
        try:
            while not self.driver.over and not (self.stop is not None and self.stop()):
                self._turn()
                if self.post.broken:
                    fail("CP0978", self.post.broken, "the servers cannot go on")
        except CommplanError as error:
            self._apologize(str(error))
            raise
        self._finish()
        return self.served()

    def served(self) -> Served:
        """What has been done so far."""
        seen, usage = self.driver.seen, resource.getrusage(resource.RUSAGE_SELF)
        unit = 1 if sys.platform == "darwin" else 1024
        return Served(
            self.name, seen.requests, seen.messages, seen.nbytes, seen.answered, seen.updates,
            tuple(self.lost), self.broken_off, self.busy, self.waiting, usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss * unit, self.driver.restored,
        )  # fmt: skip

    def _turn(self) -> None:
        """Wait for something, and deal with it."""
        since, nap = time.perf_counter(), 0.0
        while True:
            mail, lost = self.post.poll(), self.post.take_lost()
            now = time.perf_counter()
            if mail or lost or self.post.broken:
                break
            if now - since < _SPIN_S:
                continue
            if nap >= _BUSY_NAP_S and self.stop is not None and self.stop():
                self.waiting += now - since
                return
            most = _BUSY_NAP_S if self.post.busy else _IDLE_NAP_S
            nap = min(2 * nap or _NAP_S, most)
            time.sleep(nap)
        self.waiting += now - since
        for one in mail:
            self._deal(one)
        for worker in lost:
            self._lose(worker)
        self.busy += time.perf_counter() - now

    def _deal(self, mail: Mail) -> None:
        if mail.tag == LEAVE and mail.buffer.size:
            why = mail.buffer.tobytes().decode(errors="replace")
            self.broken_off[mail.worker] = why
            self._say(f"worker {mail.worker} gives up: {why}")
        self.driver.arrive(*mail)

    def _lose(self, worker: int) -> None:
        if worker in self.driver.machine.gone:
            return
        self.lost.append(worker)
        asked = self.driver.seen.requests.get(worker, 0)
        living = self.driver.sites.workers - len(self.driver.machine.gone) - 1
        self._say(f"worker {worker} died after {asked} requests; {living} workers go on")
        self.driver.lost(worker)

    def _say(self, what: str) -> None:
        text = f"commplan: {self.name}: {what} ({time.monotonic() - self._began:.1f} s)\n"
        os.write(2, text.encode())  # in one piece, among those of other ranks

    def _apologize(self, why: str) -> None:
        """Tell the workers that wait for answers why these will not come."""
        text = np.frombuffer(why.encode()[:4000], np.uint8).copy()
        for worker in range(self.driver.sites.workers):
            if worker not in self.driver.machine.gone:
                self.post.send(worker, SORRY, text)
        self._finish()

    def _finish(self) -> None:
        until = time.monotonic() + _GOODBYE_S
        while self.post.busy and time.monotonic() < until:
            self.post.poll()
            time.sleep(_NAP_S)
