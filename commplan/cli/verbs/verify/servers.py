"""What `commplan verify` says of servers: who owns what, what is kept, and which orders were tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commplan.cli.console import Console
from commplan.diagnostics import Diagnostic
from commplan.ir.schedule import Schedule
from commplan.ir.types import sized
from commplan.verify.servers.exploration import PROVED, Explored, complaint, explore_all, models_of
from commplan.verify.servers.ownership import kept, owned
from commplan.verify.servers.plan_models import QUICK, WHOLE, models


class Served:
    """The servers of a sound schedule, and the protocol as it uses it, explored. wrong: a counter-example."""

    def __init__(self, schedule: Schedule) -> None:
        self.owned, self.kept = owned(schedule), kept(schedule)
        self.explored = explore_all(models_of(schedule))
        span = self.owned[0][0].span if self.owned else None
        self.wrong = [complaint(model, span, schedule.file) for model in self.explored if model.wrong]

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
            "explored": [_data(model) for model in self.explored],
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
            *_explored(self.explored),
        ]
        return "\n".join(out) + "\n"


def _explored(explored: Sequence[Explored]) -> list[str]:
    if not explored:
        return []
    states = sum(model.states for model in explored)
    count = f"{len(explored)} models explored in every order of messages and deaths"
    lines = [f"protocol: {count}, {states:,} states:"]
    return [*lines, *(f"  {part}" for part in PROVED.split("; "))]


def _data(explored: Explored) -> dict[str, Any]:
    return {
        "model": str(explored.model), "states": explored.states,
        "wrong": explored.wrong, "path": list(explored.path),
    }  # fmt: skip


def protocol(console: Console, *, whole: bool) -> int:
    """Explore the protocol itself; 1 where there is a counter-example."""
    explored = explore_all(models(WHOLE if whole else QUICK))
    wrong: list[Diagnostic] = [complaint(model) for model in explored if model.wrong]
    lines = [f"{model.model}: {model.states:,} states" for model in explored]
    text = "\n".join([*lines, "", *_explored(explored), ""])
    data = [_data(model) for model in explored]
    return console.conclude(wrong, lambda: text, explored=data, proved=not wrong)
