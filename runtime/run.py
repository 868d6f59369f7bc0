"""A program that is bound to a mesh, functions and data."""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from commplan.lowering.jax.pytree import known_structures
from commplan.lowering.mpi.job import watchdog as mpi_watchdog
from commplan.runtime import member as members
from commplan.runtime.bound import AnyPhases, Bound, placed
from commplan.runtime.check_bound import check_bound, check_kinds
from commplan.runtime.context import Context
from commplan.runtime.input.sources.files import bound
from commplan.runtime.input.stages.functions import checked_functions
from commplan.runtime.machines.machine import BindRequest
from commplan.runtime.machines.mesh import machine_for
from commplan.runtime.observe import watchdog
from commplan.runtime.observe.metrics import PERIOD_S, Metrics, close_quietly, kept
from commplan.runtime.param_server.server_rank import ServerMachine
from commplan.tracebacks import public_face
from commplan.wait import BUSY_S, TIMEOUT_S

if TYPE_CHECKING:
    from commplan.api import Program


@public_face
class TypedRun(Bound):
    """A program on a mesh, with the methods that all plans share; plan classes add their phases to it.

    Phases are attributes: `run.start`, `run.step`, `run.every[4]`, and phases with names (`run.evaluate`).

    Raises:
        CommplanError: CP0801 or CP0802 for a mesh that does not fit; CP0803 for missing or unknown functions
            and sources; CP0901 to CP0903 for sources without random access; CP0908 for host functions with
            other parameters.
    """

    def __init__(
        self,
        program: Program[Any],
        mesh: Any,
        *,
        sources: Mapping[str, Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        seed: int = 0,
        watchdog_s: float | None = None,
        busy_s: float = BUSY_S,
        timeout: float = TIMEOUT_S,
    ) -> None:
        schedule = program.schedule

        def check() -> None:
            check_kinds(schedule, sources, functions, seed, watchdog_s, busy_s, timeout)
            check_bound(schedule, dict(sources or {}), dict(functions or {}))
            bound(schedule, dict(sources or {}), sources or {})
            checked_functions(schedule, dict(functions or {}))

        self.program = program
        context = Context(
            schedule,
            machine_for(
                BindRequest(schedule, program.digest, seed, check, watchdog_s, timeout, busy_s), mesh
            ),
            dict(functions or {}),
            operator.index(seed),
            known_structures(program.structures.values()),
        )
        super().__init__(context, sources or {})
        context.warn_about_flags()

    def __repr__(self) -> str:
        return f"<Run {self.program.schedule.plan}: {', '.join(self.phases)}>"

    @property
    def role(self) -> Literal["worker", "server"]:
        """The role of this process: under MPI the ranks after the workers are the plan's servers."""
        return "server" if isinstance(self.context.machine, ServerMachine) else "worker"

    def serve(self, **options: Any) -> Any:
        """Serve on a server until every worker has left; return None on a worker.

        options: see `commplan.runtime.param_server.serve.serve`, whose result this returns.
        """
        machine = self.context.machine
        if not isinstance(machine, ServerMachine):
            return None
        from commplan.runtime.param_server.serve import serve  # noqa: PLC0415  only where there are servers

        return serve(self.context, machine, **options)

    def close(self, why: str = "") -> None:
        """Tell the plan's servers that this worker is done.

        It waits for pending requests. Phases that send requests to servers fail afterwards (CP0832). A run
        without servers does nothing. The run is also closed at the interpreter's exit and when it is
        collected.

        Args:
            why: The reason if the worker fails, or "".
        """
        if self.role == "worker" and self.context.backend.service is not None:
            self.context.backend.service.close(why)

    @contextlib.contextmanager
    def late(self) -> Generator[None]:
        """Announce that this process will be late, for example because it evaluates or writes.

        Without this, processes that wait for it print it after `watchdog_s` of `Program.bind`, and end the
        job with CP0834 after `busy_s`.
        """
        with mpi_watchdog.expected_late(), watchdog.expected_late():
            yield

    def metrics(
        self, path: str | os.PathLike[str] | None = None, *, period_s: float = PERIOD_S,
        address: str | None = None,
    ) -> Metrics:  # fmt: skip
        """Export the costs of this run's input in Prometheus text format, to a file, over HTTP, or both.

        The metrics cover all batches that this process requests from the run, those of members included.
        Samples have the labels `plan`, `phase`, `line`, `stage` and `rank`, the number of this process. The
        file is written now, every `period_s` seconds, and at the end. The end is `close` of the result (which
        is a context manager), the collection of the run, or the interpreter's exit.

        Args:
            path: A file in an existing folder. In a job with several processes `costs.prom` becomes
                `costs.rank3.prom` unless the path contains `{rank}`.
            period_s: Seconds between two writes.
            address: `9464` on the loopback interface, or `host:9464`; rank r serves port 9464 + r.

        Raises:
            CommplanError: CP0960 if the file or port cannot be used; CP0961 for an invalid period; CP0962
                without prometheus-client; CP0963 for an invalid address.
        """
        metrics = kept(self.ledger.summaries, self.context.machine.process(), path, period_s, address)
        weakref.finalize(self, close_quietly, metrics)
        return metrics

    def join(self, name: str, parts: Mapping[int, Any]) -> Any:
        """Global arrays of the value `name` from the parts of members; see `Member.take`.

        Args:
            parts: By member, for every member with devices of this process.

        Raises:
            CommplanError: CP0811 for an unknown name, and CP0818 if the value does not differ between
                members.
        """
        axis = members.ensemble(self.program.schedule, next(iter(parts), 0))
        return self.context.machine.join(parts, placed(self, name, axis), axis)


@public_face
class Run(AnyPhases, TypedRun):
    """A program on a mesh, made by `Program.bind`; see `TypedRun`."""
