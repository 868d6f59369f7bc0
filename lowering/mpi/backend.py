"""The ranks of a communicator as a backend: one device per rank, collectives over MPI.

A rank's place is known when a program is bound, so indices are plain numbers, and JAX types nothing: what is
the same and what differs was proved when the plan was compiled.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commplan.diagnostics import fail
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Collective, Schedule, Spread
from commplan.lowering.jax import _compat
from commplan.lowering.jax.backend import BufferLayout
from commplan.lowering.jax.typing_shim import jax, lax
from commplan.lowering.mpi.collectives import Channel, Pending, Spec
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.service import Requests, Service, send_leave, waiting_line
from commplan.lowering.mpi.tuning import NATIVE
from commplan.lowering.programs import spreads
from commplan.protocol.sites import Sites
from commplan.wait import BUSY_S

Array = Any


class IssueOrder:
    """The token of what was issued last, in the function that is being traced.

    All operations of a program hang on one another by it, those of one phase on those of the phases before,
    so every rank issues them alike. Programs that are called one after the other run so anyway. The body of
    a loop is a function of its own, ordered with what is around it by what it takes and gives.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None

    def take(self) -> Array:
        trace = _compat.recording()
        if trace is not None and self._last is not None and self._last[0]() is trace:
            token = self._last[1]()
            if token is not None:
                return token
        return Channel.token()

    def put(self, token: Array) -> None:
        """Traces are not kept alive: what is referred to weakly here stays as long as its own trace."""
        trace = _compat.recording()
        self._last = None
        if trace is not None and isinstance(token, jax.core.Tracer):
            lax.neg(token)  # an operation that nothing needs holds its operand, and is left out in the end
            self._last = weakref.ref(trace), weakref.ref(token)


@dataclass(frozen=True, eq=False)
class MpiBackend:
    """One rank of a communicator: see `lowering.jax.backend.Backend`.

    sizes: the plan's axes, in its order; ranks lie on their grid row-major. spread: how each axis lies on the
    topology that the plan was compiled for. service: the plan's servers. opening: the first collective of
    each phase, and the phase.
    """

    sizes: Mapping[str, int]
    channel: Channel
    spread: Mapping[str, tuple[Spread, ...]]
    file: str = ""
    typed: bool = False
    order: IssueOrder = field(default_factory=IssueOrder)
    service: Service | None = None
    opening: tuple[tuple[Collective, str], ...] = ()

    @property
    def variadic(self) -> bool:
        """The engine takes lists where that pays, and packs nothing."""
        return False

    @property
    def asynchronous(self) -> bool:
        """One collective after the other, in the order that all ranks share."""
        return False

    def apart(self, key: str) -> contextlib.AbstractContextManager[None]:
        """The engine combines nothing."""
        del key
        return contextlib.nullcontext()

    def ways(self, axes: tuple[str, ...]) -> int:
        return self.channel.groups.ways(axes)

    def index(self, axes: str | tuple[str, ...]) -> int:
        return self.channel.groups.index((axes,) if isinstance(axes, str) else axes)

    @property
    def place(self) -> dict[str, int]:
        """This rank's index along each axis."""
        return {axis: self.index(axis) for axis in self.sizes}

    def varying(self, x: Array, axes: tuple[str, ...]) -> Array:
        return x

    def same(self, x: Array, axes: tuple[str, ...]) -> Array:
        return x

    def tie(self, x: Array, previous: Array, axes: tuple[str, ...]) -> Array:
        """All operations are ordered, one after another, whatever their operands."""
        return x

    def start_packed(
        self, xs: Sequence[Array], op: Collective, taken: BufferLayout, given: BufferLayout
    ) -> Callable[[], Sequence[Array]] | None:
        spec = self._spec(op)
        if not self.channel.takes_lists(spec, taken.size):
            return None
        return self._issued(self.channel.begin(xs, spec, taken, given, self.order.take()))

    def start(self, x: Array, op: Collective) -> Callable[[], Array] | None:
        if op.form != "split":
            return None
        finish = self._issued(self.channel.start(x, self._spec(op), self.order.take()))
        return lambda: finish()[0]

    def _issued(self, begun: tuple[Pending, Array]) -> Callable[[], Sequence[Array]]:
        pending, token = begun
        self.order.put(token)

        def finish() -> Sequence[Array]:
            if pending.handle is None:
                return pending.results
            results, after = self.channel.end(pending, self.order.take())
            self.order.put(after)
            return results

        return finish

    def behind(
        self, xs: Sequence[Array], previous: Sequence[Array], axes: tuple[str, ...]
    ) -> tuple[list[Array], list[Array]]:
        tied = list(xs)
        for before in previous:
            tied = [self.tie(x, before, axes) for x in tied]
        return tied, list(previous)

    def move(self, x: Array, op: Collective) -> Array:
        result, token = self.channel.run(x, self._spec(op), self.order.take())
        self.order.put(token)
        return result

    def _spec(self, op: Collective) -> Spec:
        levels = self.spread.get(op.axes[0], ()) if len(op.axes) == 1 else ()
        return Spec(
            op.kind,
            axes=op.axes,
            op=op.op or "sum",
            root=op.root or 0,
            algorithm=op.algorithm,
            chunk=op.hints.chunk,
            levels=levels,
            form=op.form or "call",
            where=waiting_line(op.span, self.file),
            opens=next((phase for first, phase in self.opening if first is op), ""),
        )


def _communicator(op: Collective, channel: Channel) -> None:
    """Create the communicator of `op` now: it takes all ranks, which later compile at their own pace."""
    if channel.engine is None or op.form == "rounds":
        channel.groups.blocking(op.axes)
    elif op.algorithm == NATIVE:
        channel.groups.native(op.axes)


def backend_of(
    schedule: Schedule,
    comm: Any,
    sites: Sites,
    whole: Any = None,
    requests: Requests | None = None,
    watchdog_s: float | None = None,
    meet: Rendezvous | None = None,
    busy_s: float = BUSY_S,
) -> MpiBackend:
    """The backend of a worker. Every rank of `comm`, the workers', calls it alike: it makes communicators.

    sites: the schedule's. whole: a communicator of workers and servers for what they say to each other,
    if the plan has servers; requests: of it. watchdog_s, meet, busy_s: see `Channel`.
    Raises CP0830 for servers without an engine, CP0849 if a rank does not come.
    """
    sizes, order, file = schedule.mesh_sizes, IssueOrder(), schedule.file
    job, service = requests.job if requests is not None else "", None
    channel = Channel(
        comm, sizes, watchdog_s=watchdog_s, busy_s=busy_s, plan=schedule.plan, job=job, meet=meet
    )
    opening: list[tuple[Collective, str]] = []
    for phase in schedule.phases:
        moving = [op for op in phase.ops if isinstance(op, Collective) and channel.groups.ways(op.axes) > 1]
        opening += [(op, phase.name) for op in moving[:1]]
        for op in moving:
            _communicator(op, channel)
    if sites.servers:
        if channel.engine is None or requests is None:
            send_leave(whole, sites)
            fail("CP0830", "servers are asked by the MPI engine, which cannot be had", file=file)
        service = Service(requests, whole, sites, server_names(schedule), order, file)
    spread = spreads(schedule)
    return MpiBackend(sizes, channel, spread, file, order=order, service=service, opening=tuple(opening))


def server_names(schedule: Schedule) -> tuple[str, ...]:
    """Every server of the plan, as errors name it."""
    labels: list[str] = []
    for axis in schedule.axes:
        if axis.kind is AxisKind.SERVER:
            alone = axis.size == 1
            names = (f"server {i} of `{axis.name}`" for i in range(axis.size))
            labels += [f"server `{axis.name}`"] if alone else names
    return tuple(labels)
