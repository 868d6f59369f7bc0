"""In words: what lives on servers, what workers say to them, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from commplan.cost import Predictor
from commplan.cost.servers.server_traffic import (
    Exchanged,
    Talk,
    elastic_of,
    hidden,
    instead,
    least_compute,
    talk,
    waiting,
)
from commplan.diagnostics import Span
from commplan.ir.schedule import Elastic, Schedule
from commplan.ir.types import sized, timed
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Buffer, Held, Site, Sites, nbytes_of
from commplan.topology import Topology

TENTH = 0.1  # the share of communication that is asked for where no step is given


class Telling(msgspec.Struct, frozen=True):
    """What is said of one plan line. sent: bytes that go to servers from the worker that sends most; nothing
    where workers may find the servers' memory on their own host.
    """

    lines: tuple[str, ...] = ()
    sent: int = 0


Said = dict[tuple[str, Span], Telling]


def server_lines(schedule: Schedule, predictor: Predictor | None) -> Said:
    """What is said of servers and of elastic averaging, by phase and plan line."""
    surveyed, found = sites(schedule), dict[tuple[str, Span], Telling]()
    periods = {phase.name: phase.period for phase in schedule.phases}

    def add(where: tuple[str, Span], lines: Sequence[str], sent: int = 0) -> None:
        before = found.get(where, Telling())
        found[where] = Telling((*before.lines, *lines), before.sent + sent)

    for site in surveyed.all:
        lines = [f"{title(site)}:", *(f"  {line}" for line in site_lines(site, surveyed))]
        if predictor is not None:
            one, _ = talk(site, surveyed, predictor, periods[site.phase])
            lines += [f"  {line}" for line in talk_lines(one, predictor.network.topology)]
            others = instead(predictor, site, surveyed)
            lines += [f"  instead: {what}: {timed(seconds)}" for what, seconds in others]
        add((site.phase, site.span), lines, 0 if site.mode == "hogwild" else nbytes_of(site.up))
    if predictor is None:
        return found
    for phase in schedule.phases:
        for op in (op for op in phase.ops if isinstance(op, Elastic)):
            modes = elastic_of(schedule, phase, op, predictor)
            head = f"modes of elastic averaging, {every(phase.period)}:"
            lines = mode_lines(modes, op.mode, phase.period, None)
            add((phase.name, op.span), [head, *(f"  {line}" for line in lines)])
    return found


def title(site: Site) -> str:
    """`exchange with hub`, `async with master`."""
    what = f"elastic {site.mode}" if site.kind == "elastic" else site.kind
    return f"{what} {'from' if site.kind == 'get' else 'on' if site.kind == 'put' else 'with'} {site.server}"


def site_lines(site: Site, sites: Sites) -> list[str]:
    """Where the states of a site lie, and what goes back and forth."""
    found = [held_line(one) for one in site.held]
    up, down = _counted(site.up), _counted(site.down)
    who = "the first worker of each group" if site.kind == "put" and site.per else "each worker"
    who = "the first worker" if site.kind == "put" and not site.per else who
    found.append(f"{who} sends {up} and " + (f"gets {down}" if site.down else "waits for nothing"))
    if site.token:
        others = sites.workers - len(sites.members(site))
        if others == 1:
            found.append(f"the other worker sends {_counted(site.token)}")
        elif others:
            found.append(f"each of the other {others} workers sends {_counted(site.token)}")
    if site.kind == "exchange":
        late = site.staleness or 0
        found.append(
            "each waits for the terms of all workers"
            if not late
            else f"each runs ahead of the slowest by at most {late} exchange{'s' * (late != 1)}"
        )
    return found


def held_line(one: Held) -> str:
    """`weights`: how many units on how many servers, and how even."""
    most, least, units = max(one.nbytes), min(one.nbytes), f"{one.units} unit{'s' * (one.units != 1)}"
    if len(one.nbytes) == 1:
        return f"`{one.state}`: {units} on 1 server, {sized(most)}"
    spread = " to ".join(dict.fromkeys((sized(least), sized(most))))
    return (
        f"`{one.state}`: {units} on {len(one.nbytes)} servers, {spread} on each"
        f" (largest / mean {one.balance:.3f})"
    )


def _counted(buffers: Sequence[Buffer]) -> str:
    count = sum(len(buffer.chunks) for buffer in buffers)
    if count == 1:
        return f"1 message of {sized(nbytes_of(buffers))}"
    return f"{count} messages of {sized(nbytes_of(buffers))} in all"


def talk_lines(one: Talk, topology: Topology) -> list[str]:
    """What a request takes on a topology."""
    where = ", ".join(dict.fromkeys(_place(place, topology) for place in one.places))
    asked = f"all {one.workers} workers at once" if one.kind != "put" else "to arrive"
    times = one.seconds / one.bound if one.bound else 1.0
    bound = f"{times:.2f} times the bound of {timed(one.bound)}"
    goes_by = f"{'on the' if one.limit.startswith('links') else 'in'} {one.limit}"
    found = [
        f"server{'s' * (one.servers != 1)} on {where}",
        f"{asked} {timed(one.seconds)}, {bound}; most of it {goes_by}",
    ]
    if one.kind in ("exchange", "elastic"):
        busy = f"the busiest server computes {timed(one.busy)}"
        found.append(f"one worker alone {timed(one.alone)}; {busy}")
    return found


def _place(place: int, topology: Topology) -> str:
    """`host 3`, `host 1 of rack 2`: counted from 0."""
    if topology.hosts:
        return topology.hosts[place // topology.host_places]
    names: list[str] = []
    for level in topology.levels:
        names.append(f"{level.name} {place % level.count}")
        place //= level.count
    return " of ".join(names)


def mode_lines(modes: Sequence[Exchanged], taken: str, period: int, step: float | None) -> Iterator[str]:
    """What each mode of elastic averaging would take, and the share of the time that is communication.

    step: seconds of work in a step; None where nobody knows: then how long it has to be.
    """
    head = ["", "mode", "all at once", "alone", *_heads(step), "way"]
    rows = [head, *(_row(one, one.mode == taken, period, step) for one in modes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def every(period: int) -> str:
    return "every step" if period == 1 else f"every {period} steps"


def one_mode(one: Exchanged, period: int, step: float | None) -> dict[str, Any]:
    """The same as data: shares of the time, where the seconds of a step are known."""
    found: dict[str, Any] = msgspec.structs.asdict(one)
    if step is not None:
        least, most = waiting(one, period * step)
        found |= {"share": [least, most], "share_under_a_step": hidden(one, period * step, step)}
    return found


def _heads(step: float | None) -> tuple[str, str]:
    if step is None:
        return "10% if steps take", "or, under a step,"
    return "of the time", "under a step"


def _row(one: Exchanged, taken: bool, period: int, step: float | None) -> list[str]:
    alone = timed(one.alone) if one.mode != "sync" else ""
    cells = [">" if taken else "", one.mode, timed(one.seconds), alone]
    if step is None:
        waits = least_compute(one, TENTH) / period
        under = one.seconds / (1 + period * TENTH / (1 - TENTH))
        return [*cells, timed(waits), timed(under), one.way]
    least, most = waiting(one, period * step)
    share = f"{most:.0%}" if round(least, 2) == round(most, 2) else f"{least:.0%} to {most:.0%}"
    return [*cells, share, f"{hidden(one, period * step, step):.0%}", one.way]
