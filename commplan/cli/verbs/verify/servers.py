"""What `commplan verify` says of servers: who owns what, and what is kept."""

from __future__ import annotations

from typing import Any

from commplan.ir.schedule import Schedule
from commplan.ir.types import sized
from commplan.verify.ownership import kept, owned


class Served:
    """The servers of a sound schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.owned, self.kept = owned(schedule), kept(schedule)

    def data(self) -> dict[str, Any]:
        if self.kept is None:
            return {}
        return {
            "states": [
                {
                    "state": ownership.state, "server": site.server, "units": ownership.units,
                    "nbytes": list(ownership.nbytes), "balance": ownership.balance,
                }
                for site, ownership in self.owned
            ],
            "kept": self.kept._asdict(),
        }  # fmt: skip

    def text(self) -> str:
        if self.kept is None:
            return ""
        out: list[str] = []
        for site, ownership in self.owned:
            several = len(ownership.nbytes) > 1
            most = sized(max(ownership.nbytes))
            spread = f"at most {most} on one (largest / mean {ownership.balance:.3f})" if several else most
            servers = f"{len(ownership.nbytes)} server{'s' * several} `{site.server}`"
            units = f"{ownership.units} units on {servers}"
            out.append(f"`{ownership.state}`: {units}, every element owned once, {spread}")
        late = f", at most {self.kept.staleness + 1} requests of each" if self.kept.staleness else ""
        arrived = f"what has arrived of all workers{late} at most {sized(self.kept.arriving)}"
        answers = f"answers at most {sized(self.kept.answers)}"
        out += [
            f"memory of a server: states {sized(self.kept.states)}, {arrived}, {answers}",
            f"memory of a worker for its messages: at most {sized(self.kept.worker)}",
        ]
        return "\n".join(out) + "\n"
