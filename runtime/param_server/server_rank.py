"""The ranks of servers: what they have instead of phases and arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from commplan.diagnostics import fail
from commplan.ir.schedule import Schedule
from commplan.lowering.jax.servers import refuse
from commplan.lowering.mpi.job.watchdog import RequestWatch
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Sites


@dataclasses.dataclass(frozen=True, eq=False)
class ServerMachine:
    """The machine of a server's rank (see `machine.Machine`): it runs no phase, and reports that as an error.

    Attributes:
        mesh: The communicator to which the user bound the program.
        service: A duplicate of it for messages between workers and servers; workers are its first ranks.
        sites: The sites of the plan's servers.
        number: The number of this server.
        name: Its name in errors.
        watch: The watchdog of workers' requests, if there is one.
    """

    mesh: Any
    service: Any
    sites: Sites
    number: int
    name: str
    file: str = ""
    watch: RequestWatch | None = None
    calls: None = None  # No phase waits for a server.

    def process(self) -> tuple[int, int]:
        return int(self.service.Get_rank()), int(self.service.Get_size())

    @property
    def backend(self) -> ServerMachine:
        """Phases are bound on every rank, servers included; only calls are errors."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(
            "CP0853",
            f"this rank is {self.name}: it runs no phase and holds no arrays",
            "call only run.serve() on it, which returns when all workers have left",
            "run.serve() is None on workers: use `if run.serve(): raise SystemExit` on all ranks",
            file=self.file,
        )


def check_servers(schedule: Schedule) -> None:
    """Raise CP0851 for a plan whose states live on servers: a mesh of devices has none."""
    roles = sites(schedule)
    if roles.all:
        refuse(roles.all[0].span, schedule.file)
