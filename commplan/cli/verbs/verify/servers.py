"""The report of `commplan verify` on servers: ownership and memory."""

from __future__ import annotations

from typing import Any

from commplan.ir.schedule import Schedule
from commplan.ir.types import sized
from commplan.verify.ownership import owned_states, server_memory


class ServerReport:
    """The report on the servers of a valid schedule; empty without servers.

    Attributes:
        owned: each state on servers, with a call site that uses it.
        bounds: the bounds of memory; None without servers.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.owned, self.bounds = owned_states(schedule), server_memory(schedule)

    def data(self) -> dict[str, Any]:
        """The report as JSON data."""
        if self.bounds is None:
            return {}
        return {
            "states": [
                {
                    "state": ownership.state, "server": site.server, "units": ownership.units,
                    "nbytes": list(ownership.nbytes), "balance": ownership.balance,
                }
                for site, ownership in self.owned
            ],
            "kept": self.bounds._asdict(),
        }  # fmt: skip

    def text(self) -> str:
        """The report as lines of text."""
        if self.bounds is None:
            return ""
        out: list[str] = []
        for site, ownership in self.owned:
            has_several = len(ownership.nbytes) > 1
            most = sized(max(ownership.nbytes))
            spread = (
                f"at most {most} on one (largest / mean {ownership.balance:.3f})" if has_several else most
            )
            servers = f"{len(ownership.nbytes)} server{'s' * has_several} `{site.server}`"
            units = f"{ownership.units} units on {servers}"
            out.append(f"`{ownership.state}`: {units}, every element owned once, {spread}")
        late = f", at most {self.bounds.staleness + 1} requests of each" if self.bounds.staleness else ""
        arrived = f"messages of all workers{late} at most {sized(self.bounds.arriving)}"
        answers = f"answers at most {sized(self.bounds.answers)}"
        out += [
            f"memory of a server: states {sized(self.bounds.states)}, {arrived}, {answers}",
            f"memory of a worker for its messages: at most {sized(self.bounds.worker)}",
        ]
        return "\n".join(out) + "\n"
