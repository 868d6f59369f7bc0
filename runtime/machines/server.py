"""The machine of a process that serves a plan's states under MPI.

`ServerRank` has the communicators of the server, and `ServerMachine` presents it as a `machine.Machine`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from commplan.diagnostics import fail
from commplan.lowering.jax.backend import Backend
from commplan.lowering.mpi.job.watchdog import RequestWatch
from commplan.protocol.sites import Sites
from commplan.runtime.machines.machine import Machine

if TYPE_CHECKING:
    from commplan.lowering.mpi.service import Requests  # of MPI

# The attributes of workers' machines and backends, whose use on a server is an error of the user.
_MEMBERS = {name for kind in (Machine, Backend) for name in dir(kind) if not name.startswith("_")}


@dataclasses.dataclass(frozen=True, eq=False)
class ServerRank:
    """This process as a server of a plan's states.

    Attributes:
        service: A communicator for messages between workers and servers; workers are its first ranks.
        sites: The calls to servers in the schedule.
        number: The number of this server, from 0 over all servers of the plan.
        name: The name of this server in errors.
        requests: The channel of workers' requests; None if the engine is not available.
        servers: A communicator of all servers of the plan.
    """

    service: Any
    sites: Sites
    number: int
    name: str
    requests: Requests | None
    servers: Any

    @property
    def watch(self) -> RequestWatch | None:
        """The watchdog of workers' requests, or None."""
        return None if self.requests is None else self.requests.watch

    def try_free(self) -> bool:
        """Free the communicators and return True; see `release.Freeable`. Called after all workers left."""
        if self.requests is not None:
            self.requests.free()
        self.service.Free()
        self.servers.Free()
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class ServerMachine:
    """The machine of a server's rank (see `machine.Machine`): it runs no phase, and reports that as an error.

    Attributes:
        mesh: The communicator to which the user bound the program.
        rank: This server.
        file: The plan's file, for errors.
        calls: None, because no phase waits for a server.
        role: The role of the process.
        platform: The platform of the backend, which is this object: none.
    """

    mesh: Any
    rank: ServerRank
    file: str = ""
    calls: None = None
    role: Literal["server"] = "server"
    platform: Literal[""] = ""

    def serve(self, context: Any, **options: Any) -> Any:
        """Serve until all workers have left; see `serve.serve`.

        Args:
            context: The `Context` of the bound program.
            options: The fields of `ServeOptions`.
        """
        from commplan.runtime.param_server.serve import ServeOptions, serve  # noqa: PLC0415  only on servers

        rank = cast("Any", self.rank)  # pyright sees the linked package as a different one
        return serve(context, rank, ServeOptions(**options))

    def process(self) -> tuple[int, int]:
        """The rank of this process in `service`, and the number of workers and servers."""
        return int(self.rank.service.Get_rank()), int(self.rank.service.Get_size())

    @property
    def backend(self) -> ServerMachine:
        """This object: phases are bound on every rank, servers included; only their calls are errors."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        """Raise CP0853 for all other attributes of machines and backends."""
        if name not in _MEMBERS:
            raise AttributeError(f"a machine has no attribute {name!r}")
        fail(
            "CP0853",
            f"this rank is {self.rank.name}: it runs no phase and holds no arrays",
            "call only run.serve() on it, which returns when all workers have left",
            "run.serve() is None on workers: use `if run.serve(): raise SystemExit` on all ranks",
            file=self.file,
        )
