"""`run.batches`: host batches as sharded arrays, with the device functions that belong to the input."""

from __future__ import annotations

import hashlib
import platform
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.lowering.jax.functions import Draw, loaded_by, short_seed
from commplan.lowering.jax.layout import spec
from commplan.lowering.jax.phase import needed
from commplan.lowering.jax.trees import LEAF, Tree
from commplan.lowering.jax.untyped import jax
from commplan.runtime.context import Carried, Context, strip
from commplan.runtime.data.batches import HostBatch, PhaseBatches
from commplan.runtime.data.shared import Group, group

Host = npt.NDArray[Any]


class Batches(Iterator[dict[str, Any]]):
    """What a phase makes of its sources, batch by batch: `{"batch": array, "labels": array}`.

    Iterate to run to the end of an epoch; iterate again for the next. Each item holds the phase's
    source-only outputs, and the source values that the phase takes as arguments, as global arrays in the
    layout of the plan; bytes travel as u8. Device functions on single records run here, under jit.

    `.state()` is where the next batch stands, as integers; give it back as `run.batches(state=...)`.
    `.steps` is the number of batches of an epoch, `.summary()` the cost so far; `.close()` ends the work
    ahead. Raises `CommplanError` CP09xx as `commplan.runtime.data` does, CP0819 where the processes of a
    job hold devices in a pattern that is no block of the mesh.
    """

    def __init__(
        self,
        context: Context,
        phase: ir.Phase,
        sources: Mapping[str, Any],
        *,
        state: Mapping[str, int] | None = None,
        among: Group | None = None,
        timeout: float | None = None,
    ) -> None:
        self.context, self._phase = context, phase
        self.local = local_indices(context)
        among = among or host_group(context, phase, self.local)
        if among is not None and timeout is not None:
            among = group(among.run_id, among.index, among.count, timeout=timeout, folder=among.folder)
        local = {**self.local, **{axis: (place,) for axis, place in context.members.items()}}
        schedule = context.whole or context.schedule
        self._host = PhaseBatches(
            schedule, phase.name, sources, context.functions, local=local, group=among, state=state
        )
        self._values = {value.id: value for value in phase.values}
        self._per = {value.id: value.placement.per for value in schedule.phase(phase.name).values}
        self._wanted = {b.name: b.value for b in (*phase.outputs, *phase.takes) if b.source_only}
        self._device: Any = None

    def __iter__(self) -> Batches:
        iter(self._host)
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._host)
        arrays = {ref: self._sharded(ref, host) for ref, host in batch.values.items()}
        rest = [ref for ref in self._wanted.values() if ref not in arrays]
        if rest:
            arrays |= self._map(batch, arrays)
        return {name: arrays[ref] for name, ref in self._wanted.items()}

    def state(self) -> dict[str, int]:
        """Where the next batch stands: integers, the same under any number of ranks."""
        return self._host.state()

    @property
    def steps(self) -> int:
        """Batches of one epoch."""
        return self._host.steps

    def summary(self) -> Any:
        """What the input cost so far, per plan line, in this process."""
        return self._host.summary()

    def close(self) -> None:
        """End the work ahead. Closing twice is fine."""
        self._host.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sharded(self, ref: str, host: Host) -> Any:
        """One process's part of a value, laid out as `HostBatch` says, as a global array."""
        placement, sizes = self._values[ref].placement, self.context.sizes
        fixed = [i for i, axis in enumerate(self._per[ref]) if axis in self.context.members]
        host = host.squeeze(tuple(fixed))  # of one member: its dimension is 1, and its arrays have none
        per = len(placement.per)
        lead = tuple(sizes[axis] for axis in placement.per)
        mine = [self.local[axis] for axis in placement.per]
        if placement.split:
            shards = self._shards(placement.split)
            each = host.shape[per] // len(shards)
            ways = self.context.schedule.size(placement.split)
            shape = (*lead, each * ways, *host.shape[per + 1 :])
        else:
            shards, each = [], 0
            shape = (*lead, *host.shape[per:])

        def part(index: tuple[slice, ...]) -> Host:
            at: list[int | slice] = []
            for axis, one in enumerate(index[:per]):
                start, stop, _ = one.indices(shape[axis])
                places = [mine[axis].index(i) for i in range(start, stop)]
                at.append(slice(places[0], places[-1] + 1))
            if shards:
                start, stop, _ = index[per].indices(shape[per])
                first, last = shards.index(start // each), shards.index(stop // each - 1)
                at.append(slice(first * each, (last + 1) * each))
            return host[tuple(at)]

        sharding = NamedSharding(self.context.mesh, spec(placement))
        return jax.make_array_from_callback(shape, sharding, part)

    def _shards(self, split: tuple[str, ...]) -> list[int]:
        """The shards that this process holds, in order."""
        places = [0]
        for axis in split:
            size = self.context.sizes[axis]
            places = [place * size + i for place in places for i in self.local[axis]]
        return sorted(places)

    def _map(self, batch: HostBatch, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The values that device functions make of single records."""
        records = {ref: self._sharded(ref, host.astype(np.uint32)) for ref, host in batch.records.items()}
        numbers = {
            "epoch": np.uint32(batch.epoch),
            "step": np.uint32(batch.step),
            "seeds": {ref: short_seed(seed) for ref, seed in batch.seeds.items()},
        }
        if self._device is None:
            self._device = jax.jit(self._on_device)
        return self._device(dict(arrays), records, numbers)

    def _on_device(
        self, arrays: dict[str, Any], records: dict[str, Any], numbers: Mapping[str, Any]
    ) -> dict[str, Any]:
        context = self.context
        lowered = context.lower(self._phase)
        rest = [ref for ref in self._wanted.values() if ref not in arrays]
        chosen = needed(self._phase.ops, rest, arrays)
        carried = Carried.of({ref: self._values[ref] for ref in rest})
        placements = {ref: self._values[ref].placement for ref in (*arrays, *records)}

        def body(given: dict[str, Any], rows: dict[str, Any], own: Mapping[str, Any]) -> Any:
            env = {ref: strip(Tree((x,), LEAF), placements[ref]) for ref, x in given.items()}
            mine = {ref: strip(Tree((x,), LEAF), placements[ref]).leaves[0] for ref, x in rows.items()}
            for op in chosen:
                load = loaded_by(self._phase, ir.operands(op)[0])
                draw = None
                if isinstance(op, ir.Map) and op.random:
                    base = Draw.of(own["seeds"][load], own["epoch"], own["step"])
                    draw = Draw(base.key, mine, context.members)
                lowered.apply([op], env, draw)
            return carried.leave({ref: env[ref] for ref in rest})

        specs = {ref: spec(placements[ref]) for ref in arrays}
        rows = {ref: spec(placements[ref]) for ref in records}
        made = context.shard_map(body, (specs, rows, PartitionSpec()), carried.specs)(
            arrays, records, numbers
        )
        return carried.build(made)


def local_indices(context: Context) -> dict[str, tuple[int, ...]]:
    """For each axis of the plan the indices whose devices this process holds. Raises CP0819."""
    mesh = context.mesh
    here = np.array(
        [device.process_index == jax.process_index() for device in mesh.devices.flat], dtype=np.bool_
    ).reshape(mesh.devices.shape)
    local: dict[str, tuple[int, ...]] = {}
    block = np.ones(here.shape, np.bool_)
    for place, name in enumerate(mesh.axis_names):
        others = tuple(i for i in range(here.ndim) if i != place)
        held = here.any(axis=others)
        shape = [1] * here.ndim
        shape[place] = -1
        block &= held.reshape(shape)
        if name in context.sizes:
            local[name] = tuple(int(i) for i in np.flatnonzero(held))
    if not here.any() or not (block == here).all():
        fail(
            "CP0819",
            f"process {jax.process_index()} does not hold a block of the mesh",
            "the devices of a process should be all combinations of some indices along each axis",
            "order the devices of the mesh by process: jax.make_mesh does",
            file=context.schedule.file,
        )
    return local


def host_group(context: Context, phase: ir.Phase, local: Mapping[str, tuple[int, ...]]) -> Group | None:
    """The processes of this host that share the loaded values of `phase`, or None where it is alone.

    Every process of the job calls this alike: it is one small all-gather.
    """
    shares = [op for op in phase.ops if isinstance(op, ir.Share) and op.design == "all_shared"]
    if jax.process_count() == 1 or not shares or context.members:
        return None
    from jax.experimental import multihost_utils  # noqa: PLC0415  only jobs of several processes need it

    over = {axis for op in shares for axis in op.over}
    others = repr(sorted((axis, places) for axis, places in local.items() if axis not in over))
    mine = _digest(platform.node(), _boot(), others)
    token = np.frombuffer(secrets.token_bytes(8), np.uint8)
    gather: Any = multihost_utils.process_allgather
    seen = np.asarray(gather(np.concatenate([mine, token])))
    peers = [i for i in range(len(seen)) if (seen[i, :8] == mine).all()]
    run_id = "commplan-" + seen[peers[0], 8:].tobytes().hex()
    return group(run_id, peers.index(jax.process_index()), len(peers)) if len(peers) > 1 else None


def _digest(*parts: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256("\0".join(parts).encode()).digest()[:8], np.uint8)


def _boot() -> str:
    place = Path("/proc/sys/kernel/random/boot_id")
    return place.read_text() if place.exists() else ""
