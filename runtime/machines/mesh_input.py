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
    """The input of a program on a mesh; see `machine.MachineInput`.

    Attributes:
        sizes: The mesh axes that the plan names.
        processes: The processes that may share data.
        on_cpu: Whether the devices are CPUs.
        placings: How to put host arrays on the devices, by placement, shape and dtype.
    """

    mesh: Mesh
    sizes: Mapping[str, int]
    file: str
    processes: tuple[int, ...]
    on_cpu: bool
    placings: dict[Hashable, Placing] = dataclasses.field(default_factory=dict[Hashable, Placing])

    def local(self) -> dict[str, tuple[int, ...]]:
        """Indices per axis; raises CP0819 if the devices of this process are not a block of the mesh."""
        mesh = self.mesh
        is_local = np.array(
            [device.process_index == jax.process_index() for device in mesh.devices.flat], dtype=np.bool_
        ).reshape(mesh.devices.shape)
        local: dict[str, tuple[int, ...]] = {}
        block = np.ones(is_local.shape, np.bool_)
        for place, name in enumerate(mesh.axis_names):
            other_dims = tuple(i for i in range(is_local.ndim) if i != place)
            is_local_index = is_local.any(axis=other_dims)
            shape = [1] * is_local.ndim
            shape[place] = -1
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
        """A global array from the part of each process."""
        kind = (placement, host.shape, host.dtype, *local.values())
        placing = self.placings.get(kind)
        if placing is not None:
            return placing.put(host)
        array, placing = self._first(host, placement, local)
        if placing is not None:
            self.placings[kind] = placing
        return array

    def _first(self, host: Host, placement: Placement, local: Local) -> tuple[Array, Placing | None]:
        per = len(placement.per)
        lead = tuple(self.sizes[axis] for axis in placement.per)
        indices = [local[axis] for axis in placement.per]
        if placement.split:
            shards = self._shards(placement.split, local)
            each = host.shape[per] // len(shards)
            ways = math.prod(self.sizes[axis] for axis in placement.split)
            shape = (*lead, each * ways, *host.shape[per + 1 :])
        else:
            shards, each = [], 0
            shape = (*lead, *host.shape[per:])

        def cut(index: tuple[slice, ...]) -> tuple[slice, ...]:
            at: list[slice] = []
            for axis, piece in enumerate(index[:per]):
                start, stop, _ = piece.indices(shape[axis])
                positions = [indices[axis].index(i) for i in range(start, stop)]
                at.append(slice(positions[0], positions[-1] + 1))
            if shards:
                start, stop, _ = index[per].indices(shape[per])
                first, last = shards.index(start // each), shards.index(stop // each - 1)
                at.append(slice(first * each, (last + 1) * each))
            return tuple(at)

        sharding = NamedSharding(self.mesh, spec(placement))
        return first_placed(host, shape, sharding, cut, on_cpu=self.on_cpu)

    def _shards(self, split: tuple[str, ...], local: Local) -> list[int]:
        """The shards of this process, in order."""
        points = itertools.product(*(local[axis] for axis in split))
        return sorted(position(dict(zip(split, at, strict=True)), split, self.sizes) for at in points)

    def pinning(self) -> Pinning | None:
        return pinning_of(self.mesh.local_devices)

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        if jax.process_count() == 1:  # The mesh may be described only.
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
        """A transport on a mesh of one CPU device per host: rows stay in host memory.

        A host failure is an error whatever `on_failure` is: JAX's collectives cannot continue without a host.
        """
        del on_failure
        if not division.moves():
            return None
        leaders = [peers.ranks[division.leader(host)] for host in dict.fromkeys(peers.hosts)]
        return JaxCarrier(division, peers.hosts[peers.index], cpu_devices(leaders), timeout, blame)
