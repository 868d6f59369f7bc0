"""The input of a program on the ranks of a communicator."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array

from commplan.input.work_partition import Division
from commplan.ir.types import OnFailure, Placement
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.mpi import MpiCarrier
from commplan.runtime.machines.machine import Host, Local, PeerHello, Peers, digest, peers_of
from commplan.runtime.machines.pinned import Pinning, pinning_of


@dataclasses.dataclass(frozen=True)
class RanksInput:
    """The input of a worker under MPI. `machine.MachineInput` documents the methods.

    Attributes:
        comm: A communicator of the workers.
        place: The index of this rank along each axis of the plan.
        file: The plan's file, for errors.
    """

    comm: Any
    place: Mapping[str, int]
    file: str

    def local(self) -> dict[str, tuple[int, ...]]:
        return {axis: (self.place[axis],) for axis in self.place}

    def array(self, host: Host, placement: Placement, local: Local) -> Array:
        """This rank's part on its device, without the dimensions of `per` axes."""
        del local
        return jax.device_put(host.reshape(host.shape[len(placement.per) :]))

    def pinning(self) -> Pinning | None:
        return pinning_of(jax.local_devices()[:1])

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        hello = PeerHello(digest(key), digest(host), place, secrets.token_hex(8))
        rendezvous = self._rendezvous("share the data that they load", timeout)
        hellos: list[PeerHello] = rendezvous(self.comm.allgather, hello)
        return peers_of(self.comm.Get_rank(), dict(enumerate(hellos)))

    def _rendezvous(self, purpose: str, timeout: float, ranks: Sequence[int] | None = None) -> Rendezvous:
        option = "run.batches(timeout=SECONDS)"
        return Rendezvous(self.comm, purpose, timeout, ranks=ranks, option=option, file=self.file)

    def carrier(
        self, peers: Peers, division: Division, *, blame: Blame, on_failure: OnFailure, timeout: float
    ) -> MpiCarrier | None:
        """Open a transport on a new communicator of exactly these processes."""
        if not division.moves():
            return None
        rendezvous = self._rendezvous("exchange the data that they load", timeout, peers.ranks)
        group = self.comm.Get_group().Incl(list(peers.ranks))
        comm = rendezvous(self.comm.Create_group, group)
        return MpiCarrier(comm, division, blame=blame, on_failure=on_failure, timeout=timeout)
