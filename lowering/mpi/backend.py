"""The MPI backend: one device per rank, and collectives over the ranks of a communicator.

A rank's position in the mesh is known when a program is bound, so indices are plain integers. JAX does not
type varying and replicated values here; the compiler has verified replication.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.core
from jax import Array, lax

from commplan.diagnostics import fail
from commplan.hang_limits import UNWATCHED, HangLimits
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Collective, Schedule, Spread
from commplan.ir.stages.base import StageOverAxes
from commplan.lowering.jax import _compat
from commplan.lowering.jax.backend import BufferLayout
from commplan.lowering.mpi import rounds
from commplan.lowering.mpi.collectives import Channel, Pending, Spec
from commplan.lowering.mpi.job.groups import Groups
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.service import MpiService, Requests, send_leave
from commplan.lowering.programs import spreads
from commplan.protocol.sites import Sites


class TokenOrder:
    """The token of the last operation in the function that is being traced.

    Each operation depends on the previous one through its token, across phases too. Every rank therefore runs
    the operations of a program in the same order. Programs that are called one after the other run in the
    order of the calls. A loop body is a separate function; its operands and results order it with the
    operations around it.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None

    def take(self) -> Array:
        """The token of the last operation; a new one if the current trace has none."""
        trace = _compat.recording()
        if trace is not None and self._last is not None and self._last[0]() is trace:
            token = self._last[1]()
            if token is not None:
                return token
        return Channel.token()

    def put(self, token: Array) -> None:
        """Set the token of the last operation. Weak references keep the trace from being kept alive."""
        trace = _compat.recording()
        self._last = None
        if trace is not None and isinstance(token, jax.core.Tracer):
            lax.neg(token)  # keeps `token` alive during the trace; removed as dead code
            self._last = weakref.ref(trace), weakref.ref(token)


@dataclass(frozen=True, eq=False)
class MpiBackend:
    """Implements `lowering.jax.backend.Backend` for one rank of a communicator.

    The protocol documents the methods.

    Attributes:
        sizes: The axes of the plan in order, with their sizes. Ranks are assigned to the grid row-major.
        channel: Runs the collectives.
        spread: The levels of the topology that each axis spans; see `programs.spreads`.
        file: The plan's file, for errors.
        platform: Empty, because ranks are no devices of a mesh.
        typed: False, because JAX does not type varying values here.
        order: The token of the last operation.
        service: The servers of the plan; None if it has none.
        opening: The first collective of each phase that has any, and the name of the phase.
    """

    sizes: Mapping[str, int]
    channel: Channel
    spread: Mapping[str, tuple[Spread, ...]]
    file: str = ""
    platform: str = ""
    typed: bool = False
    order: TokenOrder = field(default_factory=TokenOrder)
    service: MpiService | None = None
    opening: tuple[tuple[Collective, str], ...] = ()

    @property
    def variadic(self) -> bool:
        """False: the engine accepts several arrays per collective without packing (`start_packed`)."""
        return False

    @property
    def asynchronous(self) -> bool:
        """False: collectives run one after the other, in the same order on all ranks."""
        return False

    def combiner_scope(self, key: str) -> contextlib.AbstractContextManager[None]:
        """No effect: the engine does not combine collectives."""
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
        """`x`: tokens already order all operations."""
        return x

    def start_packed(
        self, xs: Sequence[Array], op: Collective, operand_layout: BufferLayout, result_layout: BufferLayout
    ) -> Callable[[], Sequence[Array]] | None:
        spec = self._spec(op)
        if not self.channel.can_start_packed(spec, operand_layout.size):
            return None
        return self._finish_issued(
            self.channel.begin(xs, spec, operand_layout, result_layout, self.order.take())
        )

    def start(self, x: Array, op: Collective) -> Callable[[], Array] | None:
        if op.form != "split":
            return None
        finish = self._finish_issued(self.channel.start(x, self._spec(op), self.order.take()))
        return lambda: finish()[0]

    def _finish_issued(self, begun: tuple[Pending, Array]) -> Callable[[], Sequence[Array]]:
        """The function that waits for a collective that has been issued, and returns its results."""
        pending, token = begun
        self.order.put(token)

        def finish() -> Sequence[Array]:
            if pending.handle is None:
                return pending.results
            results, after = self.channel.end(pending, self.order.take())
            self.order.put(after)
            return results

        return finish

    def ordered_after(
        self, xs: Sequence[Array], previous: Sequence[Array], axes: tuple[str, ...]
    ) -> tuple[list[Array], list[Array]]:
        """Both: tokens already order all operations."""
        return list(xs), list(previous)

    def wait_for(self, xs: Sequence[Array]) -> None:
        """Order the next operation after `xs`. Otherwise XLA:CPU might wait in it before it computes `xs`."""
        token = self.order.take()
        for x in (x for x in xs if x.size):
            token = rounds.after(token, x)
        self.order.put(token)

    def after_begun(self, xs: Sequence[Array]) -> list[Array]:
        """`xs`, ordered after the last operation. Otherwise XLA:CPU might compute with `xs` first."""
        token = self.order.take()
        self.order.put(token)
        return [rounds.tied(x, token) for x in xs]

    def move(self, x: Array, op: Collective) -> Array:
        result, token = self.channel.run(x, self._spec(op), self.order.take())
        self.order.put(token)
        return result

    def _spec(self, op: Collective) -> Spec:
        """The parameters of a collective of the schedule."""
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
            line=op.span.line,
            file=self.file,
            opens=next((phase for first, phase in self.opening if first is op), ""),
        )


def _create_communicators(schedule: Schedule, groups: Groups, *, has_engine: bool) -> None:
    """Create the communicators along the axes of all collectives, and no others later.

    Their creation is collective, and ranks trace at different times. A trace may need MPI's own collectives
    along any of these axes, whatever the schedule's algorithms are: for scalars of a split tree, and in
    `run.layers`, whose schedules are compiled while tracing.
    """
    ops = [op for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)]
    phases = schedule.origin.plan.phases if schedule.origin else ()
    stages = [stage for phase in phases for stage in phase.stages if isinstance(stage, StageOverAxes)]
    axes = [op.axes for op in ops] + [stage.axes for stage in stages if stage.COLLECTIVE is not None]
    for along in dict.fromkeys(axes):
        if all(axis in groups.sizes for axis in along) and groups.ways(along) > 1:
            if has_engine:
                groups.native(along)
            if not has_engine or any(op.form == "rounds" for op in ops):
                groups.blocking(along)
    groups.seal()


class ServerLink(NamedTuple):
    """The connection of a worker to the servers of its plan.

    Attributes:
        sites: The calls to servers in the schedule; empty for a plan without servers.
        whole: A communicator of workers and servers for the servers' own messages; None without servers.
        requests: The engine's channel on a communicator of workers and servers; None without servers or
            without the engine.
    """

    sites: Sites
    whole: Any = None
    requests: Requests | None = None


def backend_of(
    schedule: Schedule,
    comm: Any,
    link: ServerLink,
    *,
    rendezvous: Rendezvous | None = None,
    limits: HangLimits = UNWATCHED,
) -> MpiBackend:
    """Create the backend of a worker. All ranks of `comm` must call this together: it creates communicators.

    Args:
        schedule: The compiled plan.
        comm: The communicator of the workers.
        link: The connection to the plan's servers.
        rendezvous: See `Channel`.
        limits: See `Channel`.

    Raises:
        CommplanError: CP0830 if the plan has servers and the engine is not available, CP0831 if the axes do
            not match the communicator, CP0849 if a rank does not join.
    """
    sites, whole, requests = link
    sizes, order, file = schedule.mesh_sizes, TokenOrder(), schedule.file
    job, service = requests.job if requests is not None else "", None
    channel = Channel(comm, sizes, limits=limits, plan=schedule.plan, job=job, rendezvous=rendezvous)
    opening: list[tuple[Collective, str]] = []
    for phase in schedule.phases:
        collectives = [
            op for op in phase.ops if isinstance(op, Collective) and channel.groups.ways(op.axes) > 1
        ]
        opening += [(op, phase.name) for op in collectives[:1]]
    _create_communicators(schedule, channel.groups, has_engine=channel.engine is not None)
    if sites.servers:
        if channel.engine is None or requests is None:
            send_leave(whole, sites)
            fail("CP0830", "plans with servers need the MPI engine, which is not available here", file=file)
        service = MpiService(requests, whole, sites, server_names(schedule), order, file)
    spread = spreads(schedule)
    return MpiBackend(sizes, channel, spread, file, order=order, service=service, opening=tuple(opening))


def server_names(schedule: Schedule) -> tuple[str, ...]:
    """The names of the plan's servers in errors, in the order of their ranks."""
    labels: list[str] = []
    for axis in schedule.axes:
        if axis.kind is AxisKind.SERVER:
            is_only_one = axis.size == 1
            names = (f"server {i} of `{axis.name}`" for i in range(axis.size))
            labels += [f"server `{axis.name}`"] if is_only_one else names
    return tuple(labels)
