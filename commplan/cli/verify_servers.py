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
        self.wrong = [complaint(one, span, schedule.file) for one in self.explored if one.wrong]

    def data(self) -> dict[str, Any]:
        if self.kept is None:
            return {}
        return {
            "states": [
                {
                    "state": one.state, "server": site.server, "units": one.units,
                    "nbytes": list(one.nbytes), "balance": one.balance,
                }
                for site, one in self.owned
            ],
            "kept": self.kept._asdict(),
            "explored": [_data(one) for one in self.explored],
        }  # fmt: skip

    def text(self) -> str:
        if self.kept is None:
            return ""
        out: list[str] = []
        for site, one in self.owned:
            count = f"{len(one.nbytes)} server{'s' * (len(one.nbytes) != 1)} `{site.server}`"
            most = sized(max(one.nbytes))
            spread = (
                f"at most {most} on one (largest / mean {one.balance:.3f})" if len(one.nbytes) > 1 else most
            )
            out.append(f"`{one.state}`: {one.units} units on {count}, every element owned once, {spread}")
        late = f", at most {self.kept.staleness + 1} requests of each" if self.kept.staleness else ""
        arrived = f"what has arrived of all workers{late} at most {sized(self.kept.arriving)}"
        answers = f"answers at most {sized(self.kept.answers)}"
        out += [
            f"memory of a server: states {sized(self.kept.states)}, {arrived}, {answers}",
            f"memory of a worker for its messages: at most {sized(self.kept.worker)}",
            *_explored(self.explored),
        ]
        return "\n".join(out) + "\n"


def _explored(found: Sequence[Explored]) -> list[str]:
    if not found:
        return []
    states = sum(one.states for one in found)
    what = f"protocol: {len(found)} models explored in every order of messages and deaths, {states:,} states:"
    lines = [what]
    return [*lines, *(f"  {part}" for part in PROVED.split("; "))]


def _data(one: Explored) -> dict[str, Any]:
    return {
        "model": str(one.model), "states": one.states, "wrong": one.wrong, "path": list(one.path)
    }  # fmt: skip


def protocol(console: Console, *, whole: bool) -> int:
    """Explore the protocol itself; 1 where there is a counter-example."""
    found = explore_all(models(WHOLE if whole else QUICK))
    wrong: list[Diagnostic] = [complaint(one) for one in found if one.wrong]
    if not console.human:
        explored = [_data(one) for one in found]
        console.document(wrong, explored=explored, proved=not wrong)
        return int(bool(wrong))
    console.report(wrong)
    if not wrong:
        lines = [f"{one.model}: {one.states:,} states" for one in found]
        console.put("\n".join([*lines, "", *_explored(found)]) + "\n")
    return int(bool(wrong))
