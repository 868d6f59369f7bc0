"""The ranks of MPI as a fabric."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from commplan.ir.schedule import Axis, Backend, Collective, Form
from commplan.lowering.mpi import build
from commplan.lowering.mpi.backend import MpiBackend
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.runtime.calibrate.calibrate import Call, Pairs, host_gamma

STEP_S = 120.0  # Seconds for a rank to reach the next barrier.
_BURSTS = 9  # The number of bursts whose median counts.


class MpiFabric:
    """The ranks that mpirun started. `calibrate.Fabric` documents the methods.

    Attributes:
        rendezvous: Calls measurements with a timeout.
        rank: The number of this rank.
        hosts: The host of each rank.

    Raises:
        CommplanError: CP0849 if a rank does not reach the next barrier in time.
    """

    backend: Backend = "mpi"
    forms: tuple[Form, ...] = ("call",)

    def __init__(self) -> None:
        self.rendezvous = Rendezvous(MPI.COMM_WORLD, "be measured", STEP_S)
        self._comm = self.rendezvous(MPI.COMM_WORLD.Dup)
        self.rank: int = self._comm.Get_rank()
        self._channel = Channel(self._comm, rendezvous=self.rendezvous)
        self.hosts = self._channel.groups.hosts

    @property
    def longest(self) -> int:
        return 2**24  # 16 MiB, which hide the latency of links up to a few GB/s.

    def gamma(self) -> float:
        return host_gamma()

    def slowest(self, seconds: float) -> float:
        self.rendezvous.last_progress_s = time.monotonic()
        return float(self._comm.allreduce(seconds, MPI.MAX))

    def barrier(self) -> None:
        self.rendezvous.last_progress_s = time.monotonic()
        self._comm.Barrier()

    def exchange(self, pairs: Pairs, nbytes: int, times: int) -> Call:
        partner = {**dict(pairs), **{b: a for a, b in pairs}}.get(self.rank)
        if partner is None:  # This rank is in no pair.
            return lambda: None
        sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

        def call() -> None:
            for _ in range(times):
                self._comm.Sendrecv(sent, partner, recvbuf=received, source=partner)

        return call

    def timed(self, pairs: Pairs, nbytes: int, runs: int) -> list[float]:
        """See `discover.PairFabric`."""
        call, best = self.exchange(pairs, nbytes, 1), math.inf
        call()  # The first call connects.
        for _ in range(runs):
            self.barrier()
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
        seconds: list[float] = self._comm.allgather(best)
        return [max(seconds[a], seconds[b]) for a, b in pairs]

    def burst(self, pair: tuple[int, int], count: int) -> float | None:
        durations: list[float] = []
        word = np.zeros(1, np.int32)
        for _ in range(_BURSTS):
            self.barrier()
            requests: list[Any] = []
            start = time.perf_counter()
            if self.rank == pair[0]:
                requests = [self._comm.Isend(word, pair[1]) for _ in range(count)]
            durations.append(time.perf_counter() - start)  # Of the sends alone: nothing is received yet.
            if self.rank == pair[1]:
                requests = [self._comm.Irecv(np.zeros(1, np.int32), pair[0]) for _ in range(count)]
            MPI.Request.Waitall(requests)
        return float(self._comm.bcast(statistics.median(durations), pair[0]))

    def empty(self) -> Call:
        build.library()
        word = jnp.zeros(1, jnp.float32)
        shape = jax.ShapeDtypeStruct(word.shape, word.dtype)
        jitted = jax.jit(jax.ffi.ffi_call("commplan_mpi_empty", shape, has_side_effect=True))
        return lambda: jax.block_until_ready(jitted(word))

    def collective(self, op: Collective, axis: Axis, size: int) -> Call:
        spread = {axis.name: axis.levels}
        backend = MpiBackend({axis.name: axis.size}, self._over(axis), spread)
        operand = jnp.zeros(size, jnp.float32)

        def body(x: Any) -> Any:
            return backend.move(x, op)

        jitted = jax.jit(body)
        return lambda: jax.block_until_ready(jitted(operand))

    def _over(self, axis: Axis) -> Channel:
        """A channel whose only axis is `axis`. All ranks call this; it closes the channel of another axis."""
        if tuple(self._channel.groups.sizes) != (axis.name,):
            self._channel.close()
            self._channel = Channel(self._comm, {axis.name: axis.size})
        return self._channel
