"""The input of a program on a mesh of devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from collections.abc import Hashable, Mapping

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from commplan.diagnostics import fail
from commplan.input.work_partition import Division
from commplan.ir.axes import position
from commplan.ir.types import OnFailure, Placement
from commplan.lowering.jax.layout import spec
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.jax import JaxCarrier, cpu_devices
from commplan.runtime.machines.gather import Absence, gathered_values
from commplan.runtime.machines.machine import Host, Local, PeerHello, Peers, digest, peers_of
from commplan.runtime.machines.pinned import Pinning, pinning_of
from commplan.runtime.machines.placing import Placing, first_placed


@dataclasses.dataclass(frozen=True, eq=False)
class MeshInput:
    """The input of a program on a mesh. `machine.MachineInput` documents the methods.

    Attributes:
        mesh: The mesh of the run, or that of a member.
        sizes: The sizes of the mesh axes that the plan names.
        file: The plan's file, for errors.
        processes: The processes that may share data: those of the whole mesh, also for a member.
        on_cpu: Whether the devices are CPUs.
        placings: How to put host arrays on the devices, by placement, shape, dtype and local indices.
    """

    mesh: Mesh
    sizes: Mapping[str, int]
    file: str
    processes: tuple[int, ...]
    on_cpu: bool
    placings: dict[Hashable, Placing] = dataclasses.field(default_factory=dict[Hashable, Placing])

    def local(self) -> dict[str, tuple[int, ...]]:
        """The indices of this process along each axis of the plan.

        Raises CP0819 if the devices of this process are not a block of the mesh.
        """
        mesh = self.mesh
        is_local = np.array(
            [device.process_index == jax.process_index() for device in mesh.devices.flat], dtype=np.bool_
        ).reshape(mesh.devices.shape)
        local: dict[str, tuple[int, ...]] = {}
        block = np.ones(is_local.shape, np.bool_)
        for dimension, name in enumerate(mesh.axis_names):
            other_dimensions = tuple(i for i in range(is_local.ndim) if i != dimension)
            is_local_index = is_local.any(axis=other_dimensions)
            # The block is the product of the local indices along all axes.
            shape = [1] * is_local.ndim
            shape[dimension] = -1
            block &= is_local_index.reshape(shape)
            if name in self.sizes:
                local[name] = tuple(int(i) for i in np.flatnonzero(is_local_index))
        if not is_local.any() or not (block == is_local).all():
            fail(
                "CP0819",
                f"process {jax.process_index()} does not hold a block of the mesh",
                "expected the devices of a process to be all combinations of some indices along each axis",
                "order the devices of the mesh by process, as jax.make_mesh does",
                file=self.file,
            )
        return local

    def array(self, host: Host, placement: Placement, local: Local) -> Array:
        """A global array from the part of each process; all processes of the mesh call this."""
        kind = (placement, host.shape, host.dtype, *local.values())
        placing = self.placings.get(kind)
        if placing is not None:
            return placing.put(host)
        array, placing = self._first(host, placement, local)
        if placing is not None:
            self.placings[kind] = placing
        return array

    def _first(self, host: Host, placement: Placement, local: Local) -> tuple[Array, Placing | None]:
        """Put the first array of a kind on the devices; see `first_placed`."""
        per = len(placement.per)
        lead = tuple(self.sizes[axis] for axis in placement.per)
        indices = [local[axis] for axis in placement.per]
        if placement.split:
            shards = self._shards(placement.split, local)
            rows = host.shape[per] // len(shards)  # Of each shard.
            ways = math.prod(self.sizes[axis] for axis in placement.split)
            shape = (*lead, rows * ways, *host.shape[per + 1 :])
        else:
            shards, rows = [], 0
            shape = (*lead, *host.shape[per:])

        def cut(index: tuple[slice, ...]) -> tuple[slice, ...]:
            """Map a device's index into the global array to its index into `host`."""
            host_index: list[slice] = []
            for dimension, piece in enumerate(index[:per]):
                start, stop, _ = piece.indices(shape[dimension])
                positions = [indices[dimension].index(i) for i in range(start, stop)]
                host_index.append(slice(positions[0], positions[-1] + 1))
            if shards:
                start, stop, _ = index[per].indices(shape[per])
                first, last = shards.index(start // rows), shards.index(stop // rows - 1)
                host_index.append(slice(first * rows, (last + 1) * rows))
            return tuple(host_index)

        sharding = NamedSharding(self.mesh, spec(placement))
        return first_placed(host, shape, sharding, cut, on_cpu=self.on_cpu)

    def _shards(self, split: tuple[str, ...], local: Local) -> list[int]:
        """The numbers of this process's shards along the axes `split`, in increasing order."""
        points = itertools.product(*(local[axis] for axis in split))
        return sorted(position(dict(zip(split, at, strict=True)), split, self.sizes) for at in points)

    def pinning(self) -> Pinning | None:
        return pinning_of(self.mesh.local_devices)

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        """See `MachineInput.peers`; all processes of `processes` call this."""
        if jax.process_count() == 1:  # Other processes of a mesh that is only described do not run.
            return None
        processes = self.processes
        hello = PeerHello(digest(key), digest(host), place, secrets.token_hex(8))
        fix = "open the same batches in every process; run.batches(timeout=SECONDS) waits longer"
        absence = Absence("share the data that they load", fix, self.file)
        hellos = gathered_values("peers", hello, processes, timeout, absence)
        return peers_of(int(jax.process_index()), hellos)

    def carrier(
        self, peers: Peers, division: Division, *, blame: Blame, on_failure: OnFailure, timeout: float
    ) -> JaxCarrier | None:
        """Open a transport on a mesh of one CPU device per host: rows stay in host memory.

        A host failure is an error whatever `on_failure` is: JAX's collectives cannot continue without a host.
        """
        del on_failure
        if not division.moves():
            return None
        leaders = [peers.ranks[division.leader(host)] for host in dict.fromkeys(peers.hosts)]
        return JaxCarrier(division, peers.hosts[peers.index], cpu_devices(leaders), timeout, blame)
