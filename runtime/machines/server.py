"""The machine of a server's rank, and that rank."""

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

_MEMBERS = {name for kind in (Machine, Backend) for name in dir(kind) if not name.startswith("_")}


@dataclasses.dataclass(frozen=True, eq=False)
class ServerRank:
    """This process as a server of a plan's states.

    Attributes:
        service: A communicator for messages between workers and servers; workers are its first ranks.
        sites: The sites of the plan's servers.
        number: The number of this server.
        name: Its name in errors.
        requests: The channel of workers' requests, if the engine is available.
        servers: A communicator of the servers.
    """

    service: Any
    sites: Sites
    number: int
    name: str
    requests: Requests | None
    servers: Any

    @property
    def watch(self) -> RequestWatch | None:
        """The watchdog of workers' requests, if there is one."""
        return None if self.requests is None else self.requests.watch

    def try_free(self) -> bool:
        """See `release.Freeable`: called after all workers have left."""
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
    """

    mesh: Any
    rank: ServerRank
    file: str = ""
    calls: None = None  # No phase waits for a server.
    role: Literal["server"] = "server"
    platform: Literal[""] = ""  # Of the backend.

    def serve(self, context: Any, **options: Any) -> Any:
        """Serve until all workers have left; see `serve.serve`. context: that of the bound program."""
        from commplan.runtime.param_server.serve import ServeOptions, serve  # noqa: PLC0415  only on servers

        rank = cast("Any", self.rank)  # pyright sees the linked package as a different one
        return serve(context, rank, ServeOptions(**options))

    def process(self) -> tuple[int, int]:
        return int(self.rank.service.Get_rank()), int(self.rank.service.Get_size())

    @property
    def backend(self) -> ServerMachine:
        """Phases are bound on every rank, servers included; only calls are errors."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _MEMBERS:
            raise AttributeError(f"a machine has no attribute {name!r}")
        fail(
            "CP0853",
            f"this rank is {self.rank.name}: it runs no phase and holds no arrays",
            "call only run.serve() on it, which returns when all workers have left",
            "run.serve() is None on workers: use `if run.serve(): raise SystemExit` on all ranks",
            file=self.file,
        )
