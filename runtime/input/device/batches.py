"""`run.batches`: host batches as sharded arrays, after the device functions that belong to the input."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from commplan.diagnostics import fail
from commplan.input.prefetch import device_prefetch
from commplan.input.work_partition import division
from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.ir.remark import Design
from commplan.ir.types import OnFailure, Placement
from commplan.runtime.context import Context
from commplan.runtime.input.device.item import Item
from commplan.runtime.input.device.maps import DeviceMaps
from commplan.runtime.input.group import Blame, Group, group
from commplan.runtime.input.host_batch import HostBatch, Mask
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.multirate.clocked import ClockedBatches
from commplan.runtime.input.named import refuse_mask
from commplan.runtime.input.observe.accounting import Meter, Summary
from commplan.runtime.input.observe.wait_log import PATIENCE_S, log_warning
from commplan.runtime.input.restarts import Restarts
from commplan.runtime.machines.machine import Host, Machine, Peers
from commplan.runtime.observe import metrics
from commplan.tracebacks import public_face


@public_face
class Batches(Iterator[Item]):
    """Iterator over the batches that a phase makes from its sources: `{"batch": array, "labels": array}`.

    A `for` loop runs to the end of an epoch; the next loop runs the next epoch. Each item holds the phase's
    source-only outputs and the source values that the phase takes as arguments, as global arrays in the
    layout of the plan; bytes become u8. Device functions on single records run here, under jit. The item's
    `mask` marks the rows that are records.

    `run.batches` makes it. A `with` block ends the work ahead, as `close` does.

    Attributes:
        context: the context of the run, or of one member.
        local: the indices that this process holds along each axis.

    Args:
        context: see above.
        phase: the phase.
        sources: the sources by name.
        state: the result of `.state()` from which to continue; None for the first batch.
        among: the processes that share loaded values; None to find them with `shared_group`.
        timeout: seconds to wait for a live but silent peer; None for that of `among`, or `PATIENCE_S`.
        clocked: the host batches of a member that shares loads; None to make them. If set, `sources`,
            `among`, `timeout` and `workers` are not used.
        workers: "threads" or "processes", which run the host functions.
        restarts: warns if a program that resumes training restarts its batches; None for no warning.

    Raises:
        CommplanError: CP09xx as `commplan.runtime.input` does; CP0927 if `among` is set and the phase shares
            nothing; CP0819 if the processes of a job hold devices in a pattern that is not a block of the
            mesh.
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
        clocked: ClockedBatches | PhaseBatches | None = None,
        workers: str = "threads",
        restarts: Restarts | None = None,
    ) -> None:
        self.context, self._phase = context, phase
        self.local = context.machine.input.local()
        schedule = context.whole or context.schedule
        self._host: PhaseBatches | ClockedBatches
        if clocked is not None:
            self._host = clocked
        else:
            timeout_s = PATIENCE_S if timeout is None else timeout
            if among is None:
                among = shared_group(context, phase, self.local, timeout=timeout_s)
            else:
                check_group(schedule, phase, among)
                among = among if timeout is None else dataclasses.replace(among, timeout=timeout)
            local = {**self.local, **{axis: (place,) for axis, place in context.members.items()}}
            self._host = PhaseBatches(
                schedule, phase.name, sources, context.functions,
                local=local, group=among, state=state, workers=workers, timeout=timeout_s,
                pinning=context.machine.input.pinning() if device_prefetch(phase.ops) else None,
            )  # fmt: skip
        rank, _ = context.machine.process()
        for meter in self.meters:
            meter.rank = rank
        if restarts and state is None and (context.members or rank == 0) and _trains(schedule, phase):
            named = f"{phase.name!r}" if phase.name != "step" else ""
            place = tuple(context.members.items())
            self._host.restart = restarts.begin(
                f"the batches of phase `{phase.name}`", f"run.batches({named})", (phase.name, place)
            )
        self._values = {value.id: value for value in phase.values}
        self._per = {value.id: value.placement.per for value in schedule.phase(phase.name).values}
        self._outputs = {b.name: b.value for b in (*phase.outputs, *phase.takes) if b.source_only}
        self._maps: DeviceMaps | None = None

    def __iter__(self) -> Batches:
        iter(self._host)
        return self

    def __next__(self) -> Item:
        # `settle` waits until the devices have copied a batch from pinned memory.
        settle = None if self._host.pinning is None else self._host.pinning.settle
        return self._host.take(self._item, self._host.on_devices, settle)

    def _item(self, batch: HostBatch) -> Item:
        """The arrays of a host batch, and those that device functions make from it."""
        arrays = {ref: self._shard(ref, host) for ref, host in batch.values.items()}
        missing = [ref for ref in self._outputs.values() if ref not in arrays]
        if missing:
            arrays |= self._map(batch, arrays)
        named = {name: arrays[ref] for name, ref in self._outputs.items()}
        return Item.from_arrays(named, functools.partial(self._mask, batch.mask))

    def _mask(self, mask: Mask | None) -> Any:
        """See `Item.mask`. Raises CP0911 if `mask` is None."""
        if mask is None:
            refuse_mask()
        per = tuple(axis for axis in mask.placement.per if axis not in self.context.members)
        placement = Placement(per=per, split=mask.placement.split)
        return self._global_array(mask.rows, placement, mask.placement.per)

    def state(self) -> dict[str, int]:
        """The position of the next batch, as integers for `run.batches(state=...)`.

        It does not depend on the number of ranks.
        """
        return self._host.state()

    @property
    def steps(self) -> int:
        """The number of batches of an epoch."""
        return self._host.steps

    def summary(self) -> Summary:
        """The cost of the input so far, per plan line, in this process."""
        return self._host.summary()

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The meters of the phase; they stay valid after `close`."""
        return self._host.meters

    def write_metrics(self, path: str | os.PathLike[str]) -> Path:
        """Write the cost of the input so far in the text format of Prometheus.

        `run.metrics` keeps a file up to date.

        Args:
            path: a file, replaced atomically. If a job has several processes and the path has no `{rank}`,
                `costs.prom` becomes `costs.rank3.prom`.

        Returns:
            The path of the file.

        Raises:
            CommplanError: CP0960 if the file cannot be written.
        """
        place = metrics.rank_file(path, *self.context.machine.process())
        metrics.write(place, metrics.text([self.summary()]))
        return place

    def close(self) -> None:
        """End the work ahead. May be called twice."""
        self._host.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shard(self, ref: str, host: Host) -> Any:
        """This process's part of a value, in the layout of `HostBatch`, as a global array."""
        return self._global_array(host, self._values[ref].placement, self._per[ref])

    def _global_array(self, host: Host, placement: Placement, per: Sequence[str]) -> Any:
        """This process's part `host` as a global array with `placement`."""
        if self.context.members:
            fixed = [i for i, axis in enumerate(per) if axis in self.context.members]
            host = host.squeeze(tuple(fixed))  # a member's dimension has size 1, and its arrays lack it
        return self.context.machine.input.array(host, placement, self.local)

    def _map(self, batch: HostBatch, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The values that device functions make from single records."""
        compiled = self.context.compiled
        maps = self._maps = self._maps or compiled.get(self._phase.name)
        if maps is None:
            maps = DeviceMaps(self.context, self._phase, tuple(self._outputs.values()), tuple(arrays))
            self._maps = compiled[self._phase.name] = maps
        records = {ref: self._shard(ref, batch.records[ref].astype(np.uint32)) for ref in maps.loads}
        return maps(batch, arrays, records)


def _trains(schedule: ir.Schedule, phase: ir.Phase) -> bool:
    """Whether each pass over `phase` should differ from the one before, as in training.

    An evaluation, a named phase without random functions, reads the same records in the same order each time.
    """
    maps = (op for op in phase.ops if isinstance(op, ir.Map))
    return phase.kind != "named" or any(schedule.fn(op.fn).random for op in maps)


def check_group(schedule: ir.Schedule, phase: ir.Phase, among: Group) -> None:
    """Check that the processes of a group can share values of `phase`.

    If the plan makes each process compute everything, the logger `commplan.input` warns that nothing is
    shared.

    Raises:
        CommplanError: CP0927 if there are several processes and the phase has no `share`.
    """
    shares = [op for op in phase.ops if isinstance(op, ir.Share)]
    if among.count == 1 or any(op.design != "duplicate" for op in shares):
        return
    if not shares:
        refuse_group(schedule, phase.name)
    line = f"line {shares[0].span.line}: {name_of(shares[0].result)} via duplicate"
    log_warning("process %d of %d reads everything itself: %s", among.index, among.count, line)


def refuse_group(schedule: ir.Schedule, phase: str) -> NoReturn:
    """Raise CP0927: `group=` is set, and this phase shares nothing."""
    fail(
        "CP0927",
        f"group= is set for phase `{phase}`, which shares nothing: each process would read all records",
        "an ensemble shares values that are equal for its members, except records of variable length",
        "write `share VALUE over MEMBER` in the plan, or leave out group=",
        span=schedule.phase(phase).span,
        file=schedule.file,
    )


def shared_group(
    context: Context,
    phase: ir.Phase,
    local: Mapping[str, tuple[int, ...]],
    *,
    host: str | None = None,
    timeout: float = PATIENCE_S,
) -> Group | None:
    """The processes on all hosts that share the loaded values of `phase`.

    Every process of the job must call this for the same phase: it makes one small all-gather, unless the
    result is None for all. The processes of a group hold the same indices along all unshared axes. `readers`
    of a plan counts indices along the shared axes: processes whose first index is below it make the rows.

    Args:
        context: the context of the run.
        phase: the phase.
        local: the indices that this process holds along each axis.
        host: the name of this process's host; None for `this_host()`.
        timeout: seconds to wait for a live but silent peer.

    Returns:
        The group; None if the phase shares nothing, the run is one member's, or no other process shares.
    """
    shares = [op for op in phase.ops if isinstance(op, ir.Share) and op.design != "duplicate"]
    if not shares or context.members:
        return None
    over = [axis for axis in context.sizes if any(axis in op.axes for op in shares)]
    unshared = repr(sorted((axis, indices) for axis, indices in local.items() if axis not in over))
    index = 0
    for axis in over:
        index = index * context.sizes[axis] + min(local[axis])
    key = "\0".join((context.schedule.plan_digest, phase.name, unshared))
    peers = context.machine.input.peers(key, host or this_host(), index, timeout)
    if peers is None:
        return None
    first = shares[0]
    reads = [op for op in phase.ops if isinstance(op, ir.Read)]
    on_failure = "continue" if any(op.hints.on_failure == "continue" for op in reads) else "stop"
    readers = None if first.readers is None else sum(each < first.readers for each in peers.places)
    blame = Blame(f"share {name_of(first.result)} via {first.design}", first.span, context.schedule.file)
    return carried_group(context.machine, peers, first.design, blame, on_failure, timeout, readers)


def carried_group(
    machine: Machine,
    peers: Peers,
    design: Design,
    blame: Blame,
    on_failure: OnFailure,
    timeout: float,
    readers: int | None = None,
) -> Group:
    """The group of `peers`, with a carrier of rows between their hosts.

    Args:
        machine: makes the carrier. A collective call over several hosts.
        peers: the processes that share.
        design: the design of the plan's `share`.
        blame: the place in the plan that errors refer to.
        on_failure: the reaction to the death of a process.
        timeout: seconds to wait for a live but silent peer.
        readers: the number of processes that make rows; None for all.
    """
    partition = division(design, peers.hosts, readers)
    carrier = machine.input.carrier(peers, partition, blame=blame, on_failure=on_failure, timeout=timeout)
    run_id, count = f"commplan-{peers.run_id}", len(peers.hosts)
    among = group(
        run_id, peers.index, count, timeout=timeout, hosts=peers.hosts, carrier=carrier, readers=readers
    )
    return dataclasses.replace(among, ranks=peers.ranks)


def this_host() -> str:
    """A name for this process's host, which is unique among the hosts of a job.

    Processes find each other's memory in `/proc`. Containers with different PID namespaces therefore count as
    different hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    processes = Path("/proc/self/ns/pid")
    parts = [platform.node(), boot.read_text() if boot.exists() else ""]
    return "".join([*parts, str(processes.readlink()) if processes.is_symlink() else ""])
