"""A worker's requests to servers, over a communicator of workers and servers.

Workers are its first ranks, servers the others, in the order of the plan. What is asked where, in which
messages, with which tags, is known from the schedule (`commplan.protocol.sites`); here it becomes requests
of the engine.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from commplan.diagnostics import CommplanError, Span, fail
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.mpi import build, primitives
from commplan.lowering.mpi.job.drain import drain
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.job.watchdog import RequestWatch, Watched, job
from commplan.lowering.mpi.shared import Region, regions, shares
from commplan.lowering.mpi.typing_shim import MPI
from commplan.protocol.sites import LEAVE, Buffer, Site, Sites, nbytes_of, receives, sends, sent
from commplan.recorder.file import Details

Array = Any
# Of one worker to one server in flight. A server answers a unit when the last worker's term of it is there:
# the more units are under way at once, the later is the first of them whole, and the way back stands empty.
IN_FLIGHT = 512 * 1024  # bytes
LEAST, MOST = 2, 8  # messages
_GOODBYE_S = 5.0  # seconds that a last message may take to leave
_REASON = 1000  # bytes
_LAST_S = 30.0  # seconds that what is under way may take when a run is closed
_kept: list[Any] = []
_departing: list[list[bool]] = []  # a mark in each when it is done


class Requests(NamedTuple):
    """What carries requests on a communicator of workers and servers. library: the engine; channel: its own;
    watch: who says what holds them, None where nobody does. job: see `Watched`."""

    library: Any
    channel: int
    watch: RequestWatch | None
    job: str


def requests_of(
    comm: Any, bound_s: float | None, busy_s: float, meet: Rendezvous, plan: str, workers: int
) -> Requests | None:
    """Of `comm`, all of whose ranks call this alike, first so many workers; None where this rank cannot have
    the engine.

    bound_s, busy_s: see `Channel`; the longest of all counts. If a rank gives None, or has no engine, nothing
    is watched. plan: its name. Raises CP0849 if a rank does not come.
    """
    library = None
    with contextlib.suppress(CommplanError):
        library = build.library()
    own = (library is not None, bound_s, busy_s, job())
    answers: list[tuple[bool, float | None, float, str]] = meet(comm.allgather, own)
    bounds = [bound for has, bound, _, _ in answers if has and bound is not None]
    if library is None:
        return None
    channel, watch = library.commplan_channel_open(comm.py2f(), 0), None
    if len(bounds) == len(answers):
        longest, rank = max(busy for _, _, busy, _ in answers), int(comm.Get_rank())
        watched = Watched(max(bounds), longest, answers[0][3], plan)
        watch = meet(RequestWatch.begin, library, channel, watched, rank, len(answers), workers)
    return Requests(library, channel, watch, answers[0][3])


class Service:
    """See `lowering.jax.servers.Service`.

    requests: what carries them on `comm`. comm: for this alone; the workers' ranks are those of `sites`.
    names: what errors call each server. order: gives and takes the token that orders a program's operations.
    Raises CP0831 where there are more messages than tags.
    """

    def __init__(
        self, requests: Requests, comm: Any, sites: Sites, names: Sequence[str], order: Any, file: str
    ) -> None:
        self.comm, self.sites, self.file = comm, sites, file
        self.names, self.rank = tuple(names), int(comm.Get_rank())
        self._order = order
        self._library, self._process = requests.library, os.getpid()
        self._channel: int | None = requests.channel
        self._numbers: dict[int, int] = {}
        self._told: dict[tuple[str, ...], Any] = {}
        self._regions: dict[int, dict[str, Region]] | None = None
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        _open.add(self)
        buffers = [buffer for site in sites.all for buffer in (*site.up, *site.down, *site.token)]
        tags = max((chunk.tag for buffer in buffers for chunk in buffer.chunks), default=0)
        most = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        if tags > most:
            problem = f"{tags} messages, and this MPI tells {most} apart"
            fail("CP0831", problem, "give the stage larger chunks: { chunk = 1 MiB }", file=file)

    # --- requests ---

    def site(self, phase: str, result: str) -> Site:
        return self.sites.at(phase, result)

    def up(self, site: Site) -> tuple[Buffer, ...]:
        """Of what is put all workers of a group have the same: the first one sends it."""
        return sent(site, first=self._first(site))

    def _first(self, site: Site) -> bool:
        return self.sites.members(site)[self.sites.group(site, self.rank)][0] == self.rank

    def begin(self, site: Site, xs: Sequence[Array]) -> Callable[[], list[Array]]:
        number = self._number(site)
        results = [jax.ShapeDtypeStruct((b.size,), jnp.dtype(b.dtype.numpy_name)) for b in site.down]
        pending, handle, token = primitives.start(xs, self._order.take(), results, number)
        self._order.put(token)

        def finish() -> list[Array]:
            ys, after = primitives.finish(xs, pending, handle, self._order.take(), number)
            self._order.put(after)
            return ys

        return finish

    def _number(self, site: Site) -> int:
        if self._channel is None:
            fail("CP0832", "this run is closed: servers were told that nothing more comes", file=self.file)
        if site.number not in self._numbers:
            self._numbers[site.number] = self._make(site)
        return self._numbers[site.number]

    def _make(self, site: Site) -> int:
        mapped = self._shared(site)
        both = ((0, self.up(site), sends(site, first=self._first(site))), (1, site.down, receives(site)))
        rows: list[tuple[int, ...]] = []
        for answer, buffers, moves in both:
            for m in moves:
                width = buffers[m.buffer].dtype.nbytes
                if m.server not in mapped:
                    rows.append((answer, m.server, m.tag, m.buffer, m.start * width, m.size * width))
        table = np.array(rows, np.int64).reshape(len(rows), 6)
        first = self.sites.workers + site.first
        peers = np.arange(first, first + site.servers, dtype=np.int32)
        names = [
            f"{name} (rank {rank})".encode()
            for name, rank in zip(self.names[site.first : site.first + site.servers], peers, strict=True)
        ]
        counter = self._counter(site.states).ctypes.data if site.kind == "put" else None
        number = self._library.commplan_request(
            self._channel, waiting_line(site.span, self.file).encode(), peers.ctypes.data,
            (ctypes.c_char_p * len(names))(*names), len(names), table.ctypes.data, len(rows),
            _window(rows), counter,
        )  # fmt: skip
        self._library.commplan_describe(number, _details(site))
        if mapped:
            count = self._counter(site.states)
            shares(self._library, number, site, mapped, self.sites.group(site, self.rank), count)
        return number

    def _counter(self, states: tuple[str, ...]) -> Any:
        """How often this worker has put a state: one number, which the engine counts up."""
        return self._told.setdefault(states, np.zeros(1, np.int64))

    def _shared(self, site: Site) -> dict[int, Region]:
        """By server, where it keeps the state in memory that this worker sees too."""
        if site.mode != "hogwild" or site.staleness is not None:
            return {}
        if [b.dtype for b in site.down] != [part.dtype for part in site.layout.parts]:
            return {}  # what travels is narrower than what is kept
        if self._regions is None:
            ranks = range(self.sites.workers, self.sites.workers + self.sites.servers)
            self._regions = {rank: regions(self.comm, rank, self.names[i]) for i, rank in enumerate(ranks)}
        first = self.sites.workers + site.first
        mapped = {j: self._regions[first + j].get(site.states[0]) for j in range(site.servers)}
        return {j: region for j, region in mapped.items() if region is not None}

    # --- the end ---

    def close(self, why: str = "") -> None:
        """Tell the servers that nothing more comes, and why if that is a failure; stop the progress thread.

        What has been dispatched is waited for; what was compiled for them fails from now on.
        """
        if self._channel is None:
            return
        drain(own=True)
        channel, self._channel = self._channel, None
        _end(self._library, channel, self.comm, self.sites, why)

    def __del__(self) -> None:
        """Nothing can ask any more. What has begun may be under way still: a thread waits for that."""
        channel: int | None = getattr(self, "_channel", None)
        if channel is None or self._process != os.getpid():
            return
        mark: list[bool] = []
        _departing.append(mark)
        kept = (self._regions, self._told)
        _thread.start_new_thread(_depart, (mark, self._library, channel, self.comm, self.sites, kept))


def _end(library: Any, channel: int, comm: Any, sites: Sites, why: str) -> None:
    until = time.monotonic() + _LAST_S
    while library.commplan_channel_busy(channel) and time.monotonic() < until:
        time.sleep(1e-3)
    send_leave(comm, sites, why)
    library.commplan_channel_close(channel)


def _depart(mark: list[bool], library: Any, channel: int, comm: Any, sites: Sites, kept: object) -> None:
    """kept: what the engine still points to."""
    try:
        drain(own=False)
        _end(library, channel, comm, sites, "")
    finally:
        del kept
        mark.append(True)


def send_leave(comm: Any, sites: Sites, why: str = "") -> None:
    """Tell every server that nothing more comes from this worker, and why if that is a failure."""
    if MPI.Is_finalized():
        return
    word = np.frombuffer(why.encode(errors="replace")[:_REASON], np.uint8)
    waiting: list[Any] = []
    for server in range(sites.servers):
        with contextlib.suppress(MPI.Exception):  # it has died, and needs no word
            waiting.append(comm.Isend([word, MPI.BYTE], sites.workers + server, LEAVE))
    until = time.monotonic() + _GOODBYE_S
    while waiting and time.monotonic() < until:
        waiting = [request for request in waiting if not _ended(request)]
        time.sleep(1e-3 if waiting else 0)
    _kept.extend((word, request) for request in waiting)  # a message that is under way keeps its bytes


def _details(site: Site) -> bytes:
    """What a record says of its requests."""
    nbytes = nbytes_of((*site.up, *site.down, *site.token))
    return Details("request", site.kind, nbytes, "-", 0, "", ()).text().encode()


def _window(rows: Sequence[tuple[int, ...]]) -> int:
    """How many messages to one server may be in flight. rows: answer?, server, tag, buffer, offset, bytes."""
    largest = max((row[-1] for row in rows if not row[0]), default=1)
    return max(LEAST, min(MOST, IN_FLIGHT // max(1, largest)))


def waiting_line(span: Span, file: str) -> str:
    """Where what waits stands in the plan, for errors."""
    return f"line {span.line} of {file or 'the plan'} waits for it"


def _ended(request: Any) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def why_ending() -> str:
    """The uncaught exception that ends this process, or an empty text."""
    error = getattr(sys, "last_value", None)
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else ""


_open: weakref.WeakSet[Service] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)
os.register_at_fork(after_in_child=_departing.clear)


@atexit.register
def _close_all() -> None:
    """Before mpi4py finalizes MPI: servers learn that this worker ends, and why."""
    for service in list(_open):
        with contextlib.suppress(MPI.Exception):
            service.close(why_ending())
    until = time.monotonic() + _LAST_S
    while not all(_departing) and time.monotonic() < until:
        time.sleep(1e-3)
