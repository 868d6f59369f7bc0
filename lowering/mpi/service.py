"""A worker's requests to servers, over a communicator of workers and servers.

The workers are the first ranks of the communicator, the servers the last, in the order of the plan. The
schedule determines the messages of each request and their tags (`commplan.protocol.sites`). This module
creates the engine's requests from them.
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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from mpi4py import MPI

from commplan.diagnostics import CommplanError, fail
from commplan.hang_limits import HangLimits, most_patient
from commplan.lowering.mpi import build, primitives
from commplan.lowering.mpi.job.drain import drain
from commplan.lowering.mpi.job.engine_errors import waiting_line
from commplan.lowering.mpi.job.release import drop, free_dropped
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.job.watchdog import RequestWatch, Watched, forget, job
from commplan.lowering.mpi.shared import Region, regions, set_shared_units
from commplan.protocol.sites import LEAVE, LEFT, Buffer, Site, Sites, nbytes_of, receives, sends, sent
from commplan.recorder.file import Details

# Bytes in flight from a worker to a server. A server answers a unit once it has the terms of all workers.
# With more units in flight, the first one is complete later, and the return path stays idle until then.
IN_FLIGHT_NBYTES = 512 * 1024
LEAST_IN_FLIGHT = 2  # messages from a worker to a server, even if they are large
MOST_IN_FLIGHT = 8  # messages from a worker to a server, even if they are small
_LEAVE_S = 5.0  # seconds for sending the last message
_REASON_NBYTES = 1000  # the most bytes of a reason that is sent to a server
_CLOSE_S = 30.0  # seconds that running operations may take when a run is closed
_unsent: list[Any] = []  # buffer and MPI request of messages that could not be sent before `_LEAVE_S`
_closing: list[list[bool]] = []  # one list per thread that closes a channel; non-empty once it is done


class Requests(NamedTuple):
    """The engine's channel for requests, on a communicator of workers and servers.

    Attributes:
        library: The engine.
        channel: The engine's handle of the channel.
        watch: Determines which rank blocks a request; None without a watchdog.
        job: The name of the job; see `Watched`.
    """

    library: Any
    channel: int
    watch: RequestWatch | None
    job: str

    def free(self) -> None:
        """Free the channel and remove its record. All other ranks have left it."""
        self.library.commplan_channel_close(self.channel)
        self.library.commplan_channel_release(self.channel)
        if self.watch is not None and self.watch.recording is not None:
            forget(self.watch.recording)


def open_requests(
    comm: Any, limits: HangLimits, rendezvous: Rendezvous, plan: str, workers: int
) -> Requests | None:
    """Open the channel for requests. All ranks of `comm` must call this together.

    Args:
        comm: A communicator whose first `workers` ranks are workers, and the others servers.
        limits: See `most_patient`. There is no watchdog if some rank has no engine.
        rendezvous: Runs the collective calls with a timeout.
        plan: The name of the plan.
        workers: The number of workers.

    Returns:
        The channel, or None if the engine is not available on this rank.

    Raises:
        CommplanError: CP0849 if a rank does not join.
    """
    library = None
    with contextlib.suppress(CommplanError):
        library = build.library()
    answers: list[tuple[bool, HangLimits, str]]
    answers = rendezvous(comm.allgather, (library is not None, limits, job()))
    limits = most_patient([limits_of_rank for _, limits_of_rank, _ in answers])
    if library is None:
        return None
    channel, watch = library.commplan_channel_open(comm.py2f(), 0), None
    first_job = answers[0][2]
    if limits.watchdog_s is not None and all(has_engine for has_engine, *_ in answers):
        watched = Watched(limits, first_job, plan)
        watch = rendezvous(RequestWatch.begin, library, channel, watched, comm, workers)
    free_dropped()
    return Requests(library, channel, watch, first_job)


class MpiService:
    """Implements `lowering.jax.servers.ServerAccess`, which documents its methods, over MPI.

    Args:
        requests: The channel for requests on `comm`.
        comm: A communicator for the servers' own messages; the workers' ranks are those of `sites`.
        sites: The calls to servers in the plan.
        names: The name of each server in errors.
        order: Provides the token that orders the operations of a program.
        file: The plan's file, for errors.

    Attributes:
        names: The name of each server in errors.
        rank: The rank of this worker in `comm`.

    Raises:
        CommplanError: CP0831 if MPI has fewer tags than the plan has messages.
    """

    def __init__(
        self, requests: Requests, comm: Any, sites: Sites, names: Sequence[str], order: Any, file: str
    ) -> None:
        self.comm, self.sites, self.file = comm, sites, file
        self.names, self.rank = tuple(names), int(comm.Get_rank())
        self._order = order
        self._library, self._process = requests.library, os.getpid()
        self._requests: Requests | None = requests
        self._request_numbers: dict[int, int] = {}  # of the engine, by site
        self._put_counters: dict[tuple[str, ...], Any] = {}
        self._regions: dict[int, dict[str, Region]] | None = None
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        _open.add(self)
        buffers = [buffer for site in sites.all for buffer in (*site.up, *site.down, *site.token)]
        largest_tag = max((chunk.tag for buffer in buffers for chunk in buffer.chunks), default=0)
        limit = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        if largest_tag > limit:
            problem = f"the plan has {largest_tag} messages to servers, and this MPI has {limit} tags"
            fail("CP0831", problem, "give the stage larger chunks: { chunk = 1 MiB }", file=file)

    # --- requests ---

    def site(self, phase: str, result: str) -> Site:
        return self.sites.at(phase, result)

    def up(self, site: Site) -> tuple[Buffer, ...]:
        """The buffers that this worker sends. The first worker of a group sends the values in common."""
        return sent(site, first=self._is_first(site))

    def _is_first(self, site: Site) -> bool:
        """Whether this worker is the first of its group."""
        return self.sites.members(site)[self.sites.group(site, self.rank)][0] == self.rank

    def begin(self, site: Site, xs: Sequence[Array]) -> Callable[[], list[Array]]:
        number = self._request_number(site)
        results = [jax.ShapeDtypeStruct((b.size,), jnp.dtype(b.dtype.numpy_name)) for b in site.down]
        pending, handle, token = primitives.start(xs, self._order.take(), results, number)
        self._order.put(token)

        def finish() -> list[Array]:
            answers, token = primitives.finish(xs, pending, handle, self._order.take(), number)
            self._order.put(token)
            return answers

        return finish

    def _request_number(self, site: Site) -> int:
        """The engine's request of a site, created on first use. Raises CP0832 if the run is closed."""
        if self._requests is None:
            fail("CP0832", "this run is closed: its servers expect no further requests", file=self.file)
        if site.number not in self._request_numbers:
            self._request_numbers[site.number] = self._create_request(site, self._requests.channel)
        return self._request_numbers[site.number]

    def _create_request(self, site: Site, channel: int) -> int:
        """Create the engine's request with the messages of a site, without those in shared memory."""
        mapped = self._shared_regions(site)
        outgoing = 0, self.up(site), sends(site, first=self._is_first(site))
        answers = 1, site.down, receives(site)
        rows: list[tuple[int, ...]] = []  # of the engine's `Message`, with offsets in bytes
        for is_answer, buffers, messages in (outgoing, answers):
            for message in messages:
                if message.server not in mapped:
                    width = buffers[message.buffer].dtype.nbytes
                    start, nbytes = message.start * width, message.size * width
                    rows.append((is_answer, message.server, message.tag, message.buffer, start, nbytes))
        table = np.array(rows, np.int64).reshape(len(rows), 6)
        first = self.sites.workers + site.first
        peers = np.arange(first, first + site.servers, dtype=np.int32)
        names = [
            f"{name} (rank {rank})".encode()
            for name, rank in zip(self.names[site.first : site.first + site.servers], peers, strict=True)
        ]
        counter = self._counter(site.states).ctypes.data if site.kind == "put" else None
        number = self._library.commplan_request(
            channel, waiting_line(site.span.line, self.file).encode(), peers.ctypes.data,
            (ctypes.c_char_p * len(names))(*names), len(names), table.ctypes.data, len(rows),
            _window(rows), counter,
        )  # fmt: skip
        self._library.commplan_describe(number, _details(site))
        if mapped:
            count = self._counter(site.states)
            set_shared_units(self._library, number, site, mapped, self.sites.group(site, self.rank), count)
        return number

    def _counter(self, states: tuple[str, ...]) -> Any:
        """The number of times that this worker has put a state: one element, which the engine increments."""
        return self._put_counters.setdefault(states, np.zeros(1, np.int64))

    def _shared_regions(self, site: Site) -> dict[int, Region]:
        """The memory of the site's state, by the index of each server that shares it with this worker.

        Empty unless workers update the state without a lock or bound, and in the dtypes of its messages.
        Waits for the servers on first use.
        """
        if site.mode != "hogwild" or site.staleness is not None:
            return {}
        if [b.dtype for b in site.down] != [part.dtype for part in site.layout.parts]:
            return {}  # the state is stored in a wider dtype than it is sent
        if self._regions is None:
            ranks = range(self.sites.workers, self.sites.workers + self.sites.servers)
            self._regions = {rank: regions(self.comm, rank, self.names[i]) for i, rank in enumerate(ranks)}
        first = self.sites.workers + site.first
        regions_of = {
            index: self._regions[first + index].get(site.states[0]) for index in range(site.servers)
        }
        return {index: region for index, region in regions_of.items() if region is not None}

    # --- closing ---

    def close(self, reason: str = "") -> None:
        """Wait for dispatched requests, stop the progress thread and send a last message to the servers.

        Compiled programs with requests fail from now on. Further calls have no effect.

        Args:
            reason: The error that ends the run; empty if it ends normally.
        """
        if self._requests is None:
            return
        drain(this_thread=True)
        requests, self._requests = self._requests, None
        _close_channel(requests, self.comm, self.sites, reason)

    def __del__(self) -> None:
        """Close the channel in a thread, since requests may still be running.

        A finalizer may run at any point of any thread, so neither it nor its thread takes a lock: a list that
        becomes non-empty takes the role of an event.
        """
        requests: Requests | None = getattr(self, "_requests", None)
        if requests is None or self._process != os.getpid():
            return
        done: list[bool] = []
        _closing.append(done)
        buffers = (self._regions, self._put_counters)
        arguments = (done, requests, self.comm, self.sites, buffers)
        _thread.start_new_thread(_close_in_thread, arguments)


class _LeftRequests:
    """The resources of a run's requests that this worker has left: freed once all servers have, too."""

    def __init__(self, requests: Requests, comm: Any, sites: Sites) -> None:
        self._requests, self._comm = requests, comm
        self._serving = {sites.workers + server for server in range(sites.servers)}

    def try_free(self) -> bool:
        """See `release.Freeable`. Receives and discards the messages that servers have sent meanwhile."""
        status = MPI.Status()
        with contextlib.suppress(MPI.Exception):  # a server has died
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                message.Recv([np.empty(status.Get_count(MPI.BYTE), np.uint8), MPI.BYTE])
                self._serving -= {status.Get_source()} if status.Get_tag() == LEFT else set[int]()
            if not self._serving:
                self._requests.free()
                self._comm.Free()
                return True
        return False


def _close_channel(requests: Requests, comm: Any, sites: Sites, reason: str) -> None:
    """Wait for running requests, at most `_CLOSE_S`, then leave the servers and close the channel."""
    library, channel, deadline = requests.library, requests.channel, time.monotonic() + _CLOSE_S
    while library.commplan_channel_busy(channel) and time.monotonic() < deadline:
        time.sleep(1e-3)
    send_leave(comm, sites, reason)
    library.commplan_channel_close(channel)
    drop(_LeftRequests(requests, comm, sites))


def _close_in_thread(done: list[bool], requests: Requests, comm: Any, sites: Sites, buffers: object) -> None:
    """Close the channel once its requests have ended. `buffers` keeps memory of the engine alive."""
    try:
        drain(this_thread=False)
        _close_channel(requests, comm, sites, "")
    finally:
        del buffers
        done.append(True)


def send_leave(comm: Any, sites: Sites, reason: str = "") -> None:
    """Send the last message of this worker to every server, and wait for it at most `_LEAVE_S`.

    Args:
        comm: The communicator of workers and servers.
        sites: The calls to servers in the plan.
        reason: The error that ends the worker; empty if it ends normally.
    """
    if MPI.Is_finalized():
        return
    payload = np.frombuffer(reason.encode(errors="replace")[:_REASON_NBYTES], np.uint8)
    pending: list[Any] = []
    for server in range(sites.servers):
        with contextlib.suppress(MPI.Exception):  # the server has died
            pending.append(comm.Isend([payload, MPI.BYTE], sites.workers + server, LEAVE))
    deadline = time.monotonic() + _LEAVE_S
    while pending and time.monotonic() < deadline:
        pending = [request for request in pending if not _has_ended(request)]
        time.sleep(1e-3 if pending else 0)
    _unsent.extend((payload, request) for request in pending)  # the buffer of a pending send must stay alive


def _details(site: Site) -> bytes:
    """The details of a request for the flight record."""
    nbytes = nbytes_of((*site.up, *site.down, *site.token))
    return Details("request", site.kind, nbytes, "-", 0, "", ()).text().encode()


def _window(rows: Sequence[tuple[int, ...]]) -> int:
    """The number of messages that may be in flight to one server.

    A row is (is_answer, server, tag, buffer, offset, nbytes).
    """
    largest = max((row[-1] for row in rows if not row[0]), default=1)
    return max(LEAST_IN_FLIGHT, min(MOST_IN_FLIGHT, IN_FLIGHT_NBYTES // max(1, largest)))


def _has_ended(request: Any) -> bool:
    """Whether a send is complete, or has failed because its server has died."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def exception_text() -> str:
    """The uncaught exception that ends this process as text; empty if there is none."""
    error = getattr(sys, "last_value", None)
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else ""


_open: weakref.WeakSet[MpiService] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)
os.register_at_fork(after_in_child=_closing.clear)


@atexit.register
def _close_all() -> None:
    """Close all services before mpi4py finalizes MPI."""
    for service in list(_open):
        with contextlib.suppress(MPI.Exception):
            service.close(exception_text())
    deadline = time.monotonic() + _CLOSE_S
    while not all(_closing) and time.monotonic() < deadline:
        time.sleep(1e-3)
