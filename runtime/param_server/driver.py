"""Carry out the effects of a server's state machine on arrays.

`serve` passes the messages of workers to a `ServerDriver`, which sends the answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from commplan.diagnostics import fail
from commplan.ir.types import DType
from commplan.protocol.server import Effect, Machine
from commplan.protocol.sites import FIRST_TAG, LEAVE, Buffer, Chunk, Sites
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.reductions import Sum, pulled, scalar
from commplan.runtime.param_server.routing import Factor, RoutingTable, SiteRoutes
from commplan.runtime.param_server.store import Array, Pool, Shard, StateCell, Store, converted

if TYPE_CHECKING:
    from commplan.runtime.param_server.checkpoint import ServerCheckpoint
    from commplan.runtime.param_server.serve_record import ServeRecord

_TOKEN = np.zeros(1, np.int32)  # The content of an answer without data.


@dataclass
class ReceivedTerm:
    """A message that was received and is not used yet.

    Attributes:
        data: The content in the dtype of the message, a view of `buffer`.
        buffer: The memory, u8[nbytes], which is returned to the pool after use.
    """

    data: Array
    buffer: Array


@dataclass
class ServerCounters:
    """Counters of a server.

    Attributes:
        requests: The number of complete requests that were received, by worker.
        messages: The number of messages that were received, by worker, its last one excluded.
        nbytes: The bytes of these messages, by worker.
        answered: Bytes that were sent.
        updates: The number of updates and pulls of units.
    """

    requests: dict[int, int] = field(default_factory=dict[int, int])
    messages: dict[int, int] = field(default_factory=dict[int, int])
    nbytes: dict[int, int] = field(default_factory=dict[int, int])
    answered: int = 0
    updates: int = 0


class ServerDriver:
    """The state machine of one server, and its arrays.

    Args:
        sites: The calls to servers in the plan.
        server: The number of the server.
        routing: The routes of its messages.
        send: Called as (worker, tag, array) for every answer. The array does not change afterwards.
        pool: Memory for messages; None for a new pool.

    Attributes:
        machine: The state machine, which decides the effects of messages.
        store: The states on this server.
        checkpoint: The file that every change is written to, or None.
        counters: The counters so far.
        restored: Whether the states are those of a checkpoint.
        on_set: Called with the state machine after a state has been set, or None.
        record: The flight record, or None.
        terms: The received terms that are not used yet, by worker and tag, oldest first.
        sums: The sum of each unit with the buffers that it uses, by state, group and unit.
        scalars: The scalars of requests, by worker, tag and request.
        scalar_counts: The number of scalars received so far, by worker and tag.
        pending_units: The number of units that still need the scalars of a request, by site, worker and
            request.

    Raises:
        CommplanError: in `arrive` and `lost`: CP0975 if the start runs again on restored states; CP0978 if
            the server cannot continue; CP0979 for a message with an unknown tag or an unexpected size; the
            errors of the checkpoint and of update functions.
    """

    def __init__(
        self,
        sites: Sites,
        server: int,
        routing: RoutingTable,
        send: Callable[[int, int, Array], None],
        pool: Pool | None = None,
    ) -> None:
        self.machine = Machine(sites, server)
        self.sites, self.routing, self.send = sites, routing, send
        self.store = Store(sites, server, routing.leaves)
        self.pool = pool or Pool()
        self.checkpoint: ServerCheckpoint | None = None
        self.counters = ServerCounters()
        self.restored = False
        self.on_set: Callable[[Machine], None] | None = None
        self.record: ServeRecord | None = None
        self._effects = {
            "set": self._set,
            "add": self._add,
            "apply": self._apply,
            "pull": self._pull,
            "answer": self._answer,
        }
        self.terms: dict[tuple[int, int], deque[ReceivedTerm]] = {}
        self.sums: dict[tuple[str, int, int], tuple[Sum, list[Array]]] = {}
        self.scalars: dict[tuple[int, int, int], Array] = {}
        self.scalar_counts: dict[tuple[int, int], int] = {}
        self.pending_units: dict[tuple[int, int, int], int] = {}

    @property
    def all_departed(self) -> bool:
        """Whether every worker has left or died."""
        return self.machine.all_departed

    def restore(self) -> None:
        """Continue with the states of an earlier run, which are in the store, if all of them were set.

        Otherwise the program must set them again.
        """
        self.restored = all(cell.is_complete for cell in self.store.cells.values())
        if self.restored:
            self.machine.mark_restored()

    def arrive(self, worker: int, tag: int, buffer: Array) -> None:
        """Handle a message of a worker.

        Args:
            worker: The worker.
            tag: The tag.
            buffer: The content, u8[nbytes] of the pool. The driver owns it from now on.
        """
        if tag == LEAVE:
            self.pool.give(buffer)
            if self.record is not None:
                self.record.lost(worker)
        elif worker not in self.machine.departed:
            self._store_message(worker, tag, buffer)
        for effect in self.machine.arrive(worker, tag):
            self._do(effect)
            if effect.kind == "set" and self.on_set is not None:
                self.on_set(self.machine)

    def lost(self, worker: int) -> None:
        """Handle the death of a worker."""
        if self.record is not None:
            self.record.lost(worker)
        for effect in self.machine.lost(worker):
            self._do(effect)

    def _store_message(self, worker: int, tag: int, buffer: Array) -> None:
        """Store the payload of a message until an effect uses it. Raises CP0975 or CP0979."""
        if self.record is not None:
            self.record.message(worker, tag)
        routes = self.routing.by_tag.get(tag)

        counters = self.counters
        counters.messages[worker] = counters.messages.get(worker, 0) + 1
        counters.nbytes[worker] = counters.nbytes.get(worker, 0) + buffer.size
        expected = -1
        if routes is not None:
            part, chunk = routes.up[tag]
            expected = chunk.size * part.dtype.nbytes
            counters.requests[worker] = counters.requests.get(worker, 0) + (tag in routes.last)
            if buffer.size == expected and part.content == "token":
                self.pool.give(buffer)
                return
        if routes is None or buffer.size != expected:
            fail(
                "CP0979",
                f"rank {worker} sent {buffer.size} bytes with tag {tag}, expected "
                + (f"{expected}" if routes is not None else f"tags from {FIRST_TAG} that the plan has"),
                "all ranks of a job compile the same plan for the same shapes",
                file=self.routing.schedule.file,
            )
        if self.restored and routes.site.kind == "put" and routes.site.phase == "start":
            fail(
                "CP0975",
                f"`{routes.site.states[0]}` was restored from a checkpoint, but rank {worker} sets it again",
                "this would overwrite the restored value, with all updates that workers received answers for",
                "continue without run.start, and get the weights in a phase that outputs them;"
                " or use an empty folder",
                span=routes.site.span,
                file=self.routing.schedule.file,
            )

        data = buffer.view(numpy_dtype(routes.up[tag][0].dtype))
        if tag in routes.scalars:
            number = self.scalar_counts.get((worker, tag), 0)
            self.scalar_counts[worker, tag] = number + 1
            self.scalars[worker, tag, number] = data.reshape(()).copy()
            self.pool.give(buffer)
            return
        self.terms.setdefault((worker, tag), deque()).append(ReceivedTerm(data, buffer))

    # --- effects ---

    def _do(self, effect: Effect) -> None:
        """Carry out an effect. Raises CP0978 for the effect that the servers cannot continue."""
        if effect.kind == "fail":
            fail("CP0978", effect.text, "the servers cannot continue", file=self.routing.schedule.file)
        self._effects[effect.kind](effect)

    def _cell(self, effect: Effect, state: int = 0) -> StateCell:
        """The state of the effect's site for the worker's group; state: its index among those of the site."""
        site = self.sites.all[effect.site]
        return self.store.cells[site.states[state], self.machine.group[site.number, effect.worker]]

    def _take(self, worker: int, tag: int) -> ReceivedTerm:
        """Remove and return the oldest term."""
        return self.terms[worker, tag].popleft()

    def _set(self, effect: Effect) -> None:
        """Store the payload of a put as a part of the state."""
        buffer, chunk = self.routing.sites[effect.site].up[effect.tag]
        cell = self._cell(effect)
        if buffer.content == "token":  # The state has no leaves.
            for shard in cell.units.values():
                self._mark_changed(cell, shard)
            return
        term = self._take(effect.worker, effect.tag)
        if buffer.content == "scalar":
            self.store.put_scalar(cell, buffer.leaves[0], term.data)
            changed = list(cell.units.values())
        else:
            self.store.put(cell, chunk.unit, buffer.slot, term.data)
            changed = [cell.units[chunk.unit]]
        if buffer.content == "scalar" or cell.shared:  # The store has copied it.
            self.pool.give(term.buffer)
        for shard in changed:
            self._mark_changed(cell, shard)

    def _add(self, effect: Effect) -> None:
        """Add the term of a worker to the sum of a unit."""
        routes = self.routing.sites[effect.site]
        cell = self._cell(effect)
        part = cell.units[effect.unit].unit.part
        key = (cell.name, cell.group, effect.unit)
        if key not in self.sums:
            self.sums[key] = Sum(routes.gradients[part], routes.accumulate[part]), []
        total, buffers = self.sums[key]
        term = self._take(effect.worker, routes.data[effect.unit])
        weight = None
        for tag in routes.scalars:
            weight = self.scalars[effect.worker, tag, effect.request]
        if total.add(term.data, weight):
            buffers.append(term.buffer)
        else:
            self.pool.give(term.buffer)
        self._drop_scalars(routes, effect)

    def _apply(self, effect: Effect) -> None:
        """Apply the update function to a unit: all terms have been added."""
        routes = self.routing.sites[effect.site]
        cell = self._cell(effect)
        total, buffers = self.sums.pop((cell.name, cell.group, effect.unit))
        gradient = total.take(len(effect.workers), mean=routes.site.mean)

        # Some functions have a second state, which is updated along with the weights.
        shard = cell.units[effect.unit]
        second = self._cell(effect, 1) if len(routes.site.states) > 1 else None
        momentum = second.units[effect.unit] if second is not None else None
        assert routes.update is not None
        slots, scalars = ([], []) if momentum is None else (momentum.slots, momentum.scalars)
        updated = routes.update(shard.weights(), [x for x in slots if x is not None],
                           [x for x in scalars if x is not None], gradient)  # fmt: skip

        shard.slots[0] = updated[0]
        for buffer in buffers:
            self.pool.give(buffer)
        self.counters.updates += 1
        shard.updates += 1
        if second is not None and momentum is not None:
            momentum.updates = shard.updates
            momentum.slots, momentum.scalars = list(updated[1]), list(updated[2])
            self._mark_changed(second, momentum)
        self._mark_changed(cell, shard)

    def _pull(self, effect: Effect) -> None:
        """Update a unit of a center by elastic averaging with one worker, and send the pull."""
        routes = self.routing.sites[effect.site]
        cell = self._cell(effect)
        shard = cell.units[effect.unit]
        term = self._take(effect.worker, routes.data[effect.unit])
        dtype = shard.dtypes[0]
        eta, rho = (self._factor(effect, factor, dtype) for factor in (routes.eta, routes.rho))
        buffer, chunk = routes.down[effect.unit]
        reply = pulled(term.data, shard.weights(), eta, rho, buffer.dtype)
        self.pool.give(term.buffer)
        self._drop_scalars(routes, effect)
        self.counters.updates += 1
        shard.updates += 1
        self._mark_changed(cell, shard)
        self._send(effect.worker, chunk.tag, reply)

    def _answer(self, effect: Effect) -> None:
        """Answer a request: with all units for a `get`, a token, or a unit of the weights."""
        routes = self.routing.sites[effect.site]
        if routes.site.kind == "get":
            cell = self._cell(effect)
            for buffer, chunk in routes.whole:
                self._send(effect.worker, chunk.tag, _copy(cell, buffer, chunk))
        elif effect.unit < 0:
            assert routes.token is not None
            self._send(effect.worker, routes.token, _TOKEN)
        else:
            buffer, chunk = routes.down[effect.unit]
            weights = self._cell(effect).units[effect.unit].weights()
            self._send(effect.worker, chunk.tag, converted(weights, buffer.dtype))

    def _send(self, worker: int, tag: int, array: Array) -> None:
        """Count, record and send a message of an answer."""
        self.counters.answered += array.nbytes
        if self.record is not None:
            self.record.message(worker, tag)
        self.send(worker, tag, array)

    def _mark_changed(self, cell: StateCell, shard: Shard) -> None:
        """Count an update of a shard, and write it to the checkpoint."""
        shard.version += 1
        if self.checkpoint is not None:
            self.checkpoint.save(cell, shard)

    # --- the scalars of a request, which all of its units use ---

    def _factor(self, effect: Effect, factor: Factor, dtype: DType) -> Array:
        """The value of a factor: a literal as `dtype`, or the scalar that the request contains."""
        if factor.tag is None:
            return scalar(factor.value, dtype)
        return self.scalars[effect.worker, factor.tag, effect.request]

    def _drop_scalars(self, routes: SiteRoutes, effect: Effect) -> None:
        """Remove the scalars of a request once its last unit has used them."""
        if not routes.scalars:
            return
        key = (effect.site, effect.worker, effect.request)
        remaining = self.pending_units.pop(key, len(routes.data)) - 1
        if remaining:
            self.pending_units[key] = remaining
            return
        for tag in routes.scalars:
            del self.scalars[effect.worker, tag, effect.request]


def _copy(cell: StateCell, buffer: Buffer, chunk: Chunk) -> Array:
    """A copy of a part of a state for a `get`."""
    if buffer.content == "scalar":  # Every unit stores all scalars.
        number = cell.layout.scalars.index(buffer.leaves[0])
        array = next(iter(cell.units.values())).scalars[number]
    else:
        array = cell.units[chunk.unit].slots[buffer.slot]
    assert array is not None, "requested before it was set"
    return np.atleast_1d(array).copy()
