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
class Serving:
    """The machine of a server's rank (see `machine.Machine`): it runs no phase, and says so.

    mesh: the communicator that the program was bound to. service: a duplicate of it, for what workers and
    servers say to each other; workers are its first ranks.
    number: which of them this is. name: what errors call it. watch: of what workers ask, if anybody watches.
    """

    mesh: Any
    service: Any
    sites: Sites
    number: int
    name: str
    file: str = ""
    watch: RequestWatch | None = None
    calls: None = None  # nobody waits in a phase for a server

    def process(self) -> tuple[int, int]:
        return int(self.service.Get_rank()), int(self.service.Get_size())

    @property
    def backend(self) -> Serving:
        """Phases are bound on every rank; to run one is another matter."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(
            "CP0853",
            f"this rank is {self.name}: it runs no phase, and holds no arrays",
            "call run.serve() on it, which returns when all workers have left, and nothing else",
            "run.serve() is None on workers: `if run.serve(): raise SystemExit` does for all ranks",
            file=self.file,
        )


def check_servers(schedule: Schedule) -> None:
    """Raises CP0851 for a plan whose states live on servers: a mesh of devices has none."""
    roles = sites(schedule)
    if roles.all:
        refuse(roles.all[0].span, schedule.file)
