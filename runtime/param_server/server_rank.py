"""The ranks of servers."""

from __future__ import annotations

import dataclasses
from typing import Any

from commplan.ir.schedule import Schedule
from commplan.lowering.jax.servers import refuse
from commplan.lowering.mpi.job.watchdog import RequestWatch
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Sites


@dataclasses.dataclass(frozen=True, eq=False)
class ServerRank:
    """This process as a server of a plan's states.

    Attributes:
        service: A communicator for messages between workers and servers; workers are its first ranks.
        sites: The sites of the plan's servers.
        number: The number of this server.
        name: Its name in errors.
        watch: The watchdog of workers' requests, if there is one.
    """

    service: Any
    sites: Sites
    number: int
    name: str
    watch: RequestWatch | None = None


def check_servers(schedule: Schedule) -> None:
    """Raise CP0851 for a plan with states on servers: a mesh of devices has none."""
    roles = sites(schedule)
    if roles.all:
        refuse(roles.all[0].span, schedule.file)
