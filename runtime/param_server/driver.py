"""What the state machine of a server asks for, carried out on arrays."""

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
from commplan.runtime.param_server.routing import Desk, Desks, Scalars
from commplan.runtime.param_server.store import Array, Cell, Kept, Pool, Store, converted

if TYPE_CHECKING:
    from commplan.runtime.param_server.checkpoint import Keep
    from commplan.runtime.param_server.serve_record import ServeRecord

_TOKEN = np.zeros(1, np.int32)


@dataclass
class PendingMessage:
    """A message that has come and is not used up."""

    data: Array
    buffer: Array


@dataclass
class RequestCounts:
    """What has been asked of a server. requests, messages, nbytes: by worker, what came. answered: bytes that
    went out. updates: units updated."""

    requests: dict[int, int] = field(default_factory=dict[int, int])
    messages: dict[int, int] = field(default_factory=dict[int, int])
    nbytes: dict[int, int] = field(default_factory=dict[int, int])
    answered: int = 0
    updates: int = 0


class Driver:
    """One server's machine with its arrays. send: (worker, tag, array) is called for every answer; the array
    does not change after that.

    Raises `CommplanError`: CP0975 where the start is run again on restored states, CP0978 where nothing more
    can be served, CP0979 for a message of another size than the plan says.
    """

    def __init__(
        self,
        sites: Sites,
        server: int,
        desks: Desks,
        send: Callable[[int, int, Array], None],
        pool: Pool | None = None,
        keeper: Keep | None = None,
    ) -> None:
        self.machine = Machine(sites, server)
        self.sites, self.desks, self.send = sites, desks, send
        self.store = Store(sites, server, desks.leaves)
        self.pool, self.keeper = pool or Pool(), keeper
        self.seen = RequestCounts()
        self.restored = False
        self.published: Callable[[Machine], None] | None = None  # called after a state has been set
        self.record: ServeRecord | None = None
        self._effects = {
            "set": self._set,
            "add": self._add,
            "apply": self._apply,
            "pull": self._pull,
            "answer": self._answer,
        }
        self.terms: dict[tuple[int, int], deque[PendingMessage]] = {}  # by worker and tag, oldest first
        self.sums: dict[tuple[str, int, int], tuple[Sum, list[Array]]] = {}  # by state, group and unit
        self.scalars: dict[tuple[int, int, int], Array] = {}  # by worker, tag and request
        self.begun: dict[tuple[int, int], int] = {}  # by worker and tag of a scalar, how many have come
        self.left: dict[tuple[int, int, int], int] = {}  # by site, worker and request, units that need them

    @property
    def over(self) -> bool:
        """Whether every worker has left or died."""
        return self.machine.over

    def restore(self) -> None:
        """Go on with what is in the store from an earlier run. If that was killed before all states were set,
        they are set anew."""
        self.restored = all(cell.whole for cell in self.store.cells.values())
        if self.restored:
            self.machine.restored()

    def arrive(self, worker: int, tag: int, buffer: Array) -> None:
        """A message has come: u8 [nbytes], taken from the pool, and the driver's from now on."""
        if tag == LEAVE:
            self.pool.give(buffer)
            if self.record is not None:
                self.record.lost(worker)
        elif worker not in self.machine.gone:
            self._hold(worker, tag, buffer)
        for effect in self.machine.arrive(worker, tag):
            self._do(effect)
            if effect.kind == "set" and self.published is not None:
                self.published(self.machine)

    def lost(self, worker: int) -> None:
        """A worker has died."""
        if self.record is not None:
            self.record.lost(worker)
        for effect in self.machine.lost(worker):
            self._do(effect)

    def _hold(self, worker: int, tag: int, buffer: Array) -> None:
        if self.record is not None:
            self.record.message(worker, tag)
        desk = self.desks.of_tag.get(tag)
        seen = self.seen
        seen.messages[worker] = seen.messages.get(worker, 0) + 1
        seen.nbytes[worker] = seen.nbytes.get(worker, 0) + buffer.size
        wanted = -1
        if desk is not None:
            part, chunk = desk.up[tag]
            wanted = chunk.size * part.dtype.nbytes
            seen.requests[worker] = seen.requests.get(worker, 0) + (tag in desk.last)
            if buffer.size == wanted and part.what == "token":
                self.pool.give(buffer)
                return
        if desk is None or buffer.size != wanted:
            fail(
                "CP0979",
                f"rank {worker} sent {buffer.size} bytes with tag {tag}, expected "
                + (f"{wanted}" if desk is not None else f"tags from {FIRST_TAG} that the plan has"),
                "all ranks of a job compile the same plan for the same shapes",
                file=self.desks.schedule.file,
            )
        if self.restored and desk.site.kind == "put" and desk.site.phase == "start":
            fail(
                "CP0975",
                f"`{desk.site.states[0]}` was restored from a checkpoint, and rank {worker} starts anew",
                "its value, with every push that was acknowledged, would be lost",
                "go on without run.start, and ask for the weights in a phase that outputs them;"
                " or begin with an empty folder",
                span=desk.site.span,
                file=self.desks.schedule.file,
            )
        data = buffer.view(numpy_dtype(desk.up[tag][0].dtype))
        if tag in desk.scalars:
            number = self.begun.get((worker, tag), 0)
            self.begun[worker, tag] = number + 1
            self.scalars[worker, tag, number] = data.reshape(()).copy()
            self.pool.give(buffer)
            return
        self.terms.setdefault((worker, tag), deque()).append(PendingMessage(data, buffer))

    # --- effects ---

    def _do(self, effect: Effect) -> None:
        if effect.kind == "fail":
            fail("CP0978", effect.text, "the servers cannot go on", file=self.desks.schedule.file)
        self._effects[effect.kind](effect)

    def _cell(self, effect: Effect, state: int = 0) -> Cell:
        site = self.sites.all[effect.site]
        return self.store.cells[site.states[state], self.machine.group[site.number, effect.worker]]

    def _take(self, worker: int, tag: int) -> PendingMessage:
        return self.terms[worker, tag].popleft()

    def _set(self, effect: Effect) -> None:
        buffer, chunk = self.desks.all[effect.site].up[effect.tag]
        cell = self._cell(effect)
        if buffer.what == "token":  # of a state without leaves
            for kept in cell.units.values():
                self._changed(cell, kept)
            return
        term = self._take(effect.worker, effect.tag)
        if buffer.what == "scalar":
            self.store.put_scalar(cell, buffer.leaves[0], term.data)
            changed = list(cell.units.values())
        else:
            self.store.put(cell, chunk.unit, buffer.slot, term.data)
            changed = [cell.units[chunk.unit]]
        if buffer.what == "scalar" or cell.shared:
            self.pool.give(term.buffer)
        for kept in changed:
            self._changed(cell, kept)

    def _add(self, effect: Effect) -> None:
        desk = self.desks.all[effect.site]
        cell = self._cell(effect)
        part = cell.units[effect.unit].unit.part
        key = (cell.name, cell.group, effect.unit)
        if key not in self.sums:
            self.sums[key] = Sum(desk.gradients[part], desk.accumulate[part]), []
        total, buffers = self.sums[key]
        term = self._take(effect.worker, desk.data[effect.unit])
        weight = None
        for tag in desk.scalars:
            weight = self.scalars[effect.worker, tag, effect.request]
        if total.add(term.data, weight):
            buffers.append(term.buffer)
        else:
            self.pool.give(term.buffer)
        self._scalars_used(desk, effect)

    def _apply(self, effect: Effect) -> None:
        desk = self.desks.all[effect.site]
        cell = self._cell(effect)
        total, buffers = self.sums.pop((cell.name, cell.group, effect.unit))
        g = total.take(len(effect.workers), mean=desk.site.mean)
        kept = cell.units[effect.unit]
        second = self._cell(effect, 1) if len(desk.site.states) > 1 else None
        momentum = second.units[effect.unit] if second is not None else None
        assert desk.update is not None
        slots, scalars = ([], []) if momentum is None else (momentum.slots, momentum.scalars)
        updated = desk.update(kept.weights(), [x for x in slots if x is not None],
                           [x for x in scalars if x is not None], g)  # fmt: skip
        kept.slots[0] = updated[0]
        for buffer in buffers:
            self.pool.give(buffer)
        self.seen.updates += 1
        kept.updates += 1
        if second is not None and momentum is not None:
            momentum.updates = kept.updates
            momentum.slots, momentum.scalars = list(updated[1]), list(updated[2])
            self._changed(second, momentum)
        self._changed(cell, kept)

    def _pull(self, effect: Effect) -> None:
        desk = self.desks.all[effect.site]
        cell = self._cell(effect)
        kept = cell.units[effect.unit]
        term = self._take(effect.worker, desk.data[effect.unit])
        dtype = kept.dtypes[0]
        eta, rho = (self._factor(effect, factor, dtype) for factor in (desk.eta, desk.rho))
        buffer, chunk = desk.down[effect.unit]
        reply = pulled(term.data, kept.weights(), eta, rho, buffer.dtype)
        self.pool.give(term.buffer)
        self._scalars_used(desk, effect)
        self.seen.updates += 1
        kept.updates += 1
        self._changed(cell, kept)
        self._send(effect.worker, chunk.tag, reply)

    def _answer(self, effect: Effect) -> None:
        desk = self.desks.all[effect.site]
        if desk.site.kind == "get":
            cell = self._cell(effect)
            for buffer, chunk in desk.whole:
                self._send(effect.worker, chunk.tag, _copied(cell, buffer, chunk))
        elif effect.unit < 0:
            assert desk.token is not None
            self._send(effect.worker, desk.token, _TOKEN)
        else:
            buffer, chunk = desk.down[effect.unit]
            weights = self._cell(effect).units[effect.unit].weights()
            self._send(effect.worker, chunk.tag, converted(weights, buffer.dtype))

    def _send(self, worker: int, tag: int, array: Array) -> None:
        self.seen.answered += array.nbytes
        if self.record is not None:
            self.record.message(worker, tag)
        self.send(worker, tag, array)

    def _changed(self, cell: Cell, kept: Kept) -> None:
        kept.version += 1
        if self.keeper is not None:
            self.keeper.save(cell, kept)

    # --- the scalars of a request, which all its units use ---

    def _factor(self, effect: Effect, given: Scalars, dtype: DType) -> Array:
        if given.tag is None:
            return scalar(given.value, dtype)
        return self.scalars[effect.worker, given.tag, effect.request]

    def _scalars_used(self, desk: Desk, effect: Effect) -> None:
        """Forget the scalars of a request when its last unit has used them."""
        if not desk.scalars:
            return
        key = (effect.site, effect.worker, effect.request)
        left = self.left.pop(key, len(desk.data)) - 1
        if left:
            self.left[key] = left
            return
        for tag in desk.scalars:
            del self.scalars[effect.worker, tag, effect.request]


def _copied(cell: Cell, buffer: Buffer, chunk: Chunk) -> Array:
    """A part of a state for a `get`; later changes do not show in it."""
    if buffer.what == "scalar":
        number = cell.layout.scalars.index(buffer.leaves[0])
        scalar = next(iter(cell.units.values())).scalars[number]
    else:
        scalar = cell.units[chunk.unit].slots[buffer.slot]
    assert scalar is not None, "asked for before it was set"
    return np.atleast_1d(scalar).copy()
