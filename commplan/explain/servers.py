"""In words: what lives on servers, what workers say to them, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from commplan.cost import Predictor
from commplan.cost.servers.server_traffic import (
    Exchanged,
    ServerTiming,
    alternatives_to_servers,
    elastic_of,
    hidden,
    least_compute,
    server_timing,
    waiting,
)
from commplan.diagnostics import Span
from commplan.explain.stages import table_lines
from commplan.ir.schedule import Elastic, Schedule
from commplan.ir.types import sized, timed
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Buffer, Held, Site, Sites, nbytes_of
from commplan.topology import Topology

TENTH = 0.1  # the share of communication that is asked for where no step is given
_UNKNOWN_STEP = ("10% if steps take", "or, under a step,")


class ServerText(msgspec.Struct, frozen=True):
    """What is said of one plan line. sent: bytes that go to servers from the worker that sends most; nothing
    where workers may find the servers' memory on their own host.
    """

    lines: tuple[str, ...] = ()
    sent: int = 0


Said = dict[tuple[str, Span], ServerText]


def server_lines(schedule: Schedule, predictor: Predictor | None) -> Said:
    """What is said of servers and of elastic averaging, by phase and plan line."""
    surveyed, texts = sites(schedule), dict[tuple[str, Span], ServerText]()
    periods = {phase.name: phase.period for phase in schedule.phases}

    def add(where: tuple[str, Span], lines: Sequence[str], sent: int = 0) -> None:
        before = texts.get(where, ServerText())
        texts[where] = ServerText((*before.lines, *lines), before.sent + sent)

    for site in surveyed.all:
        lines = [f"{title(site)}:", *(f"  {line}" for line in site_lines(site, surveyed))]
        if predictor is not None:
            timing, _ = server_timing(site, surveyed, predictor, periods[site.phase])
            lines += [f"  {line}" for line in talk_lines(timing, predictor.network.topology)]
            others = alternatives_to_servers(predictor, site, surveyed)
            lines += [f"  instead: {way}: {timed(seconds)}" for way, seconds in others]
        add((site.phase, site.span), lines, 0 if site.mode == "hogwild" else nbytes_of(site.up))
    if predictor is None:
        return texts
    for phase in schedule.phases:
        for op in (op for op in phase.ops if isinstance(op, Elastic)):
            modes = elastic_of(schedule, phase, op, predictor)
            head = f"modes of elastic averaging, {every(phase.period)}:"
            lines = mode_lines(modes, op.mode, phase.period, None)
            add((phase.name, op.span), [head, *(f"  {line}" for line in lines)])
    return texts


def title(site: Site) -> str:
    """`exchange with hub`, `async with master`."""
    kind = f"elastic {site.mode}" if site.kind == "elastic" else site.kind
    return f"{kind} {'from' if site.kind == 'get' else 'on' if site.kind == 'put' else 'with'} {site.server}"


def site_lines(site: Site, sites: Sites) -> list[str]:
    """Where the states of a site lie, and what goes back and forth."""
    lines = [held_line(held) for held in site.held]
    up, down = _counted(site.up), _counted(site.down)
    who = "the first worker of each group" if site.kind == "put" and site.per else "each worker"
    who = "the first worker" if site.kind == "put" and not site.per else who
    lines.append(f"{who} sends {up} and " + (f"gets {down}" if site.down else "waits for nothing"))
    if site.token:
        others = sites.workers - len(sites.members(site))
        if others == 1:
            lines.append(f"the other worker sends {_counted(site.token)}")
        elif others:
            lines.append(f"each of the other {others} workers sends {_counted(site.token)}")
    if site.kind == "exchange":
        late = site.staleness or 0
        lines.append(
            "each waits for the terms of all workers"
            if not late
            else f"each runs ahead of the slowest by at most {late} exchange{'s' * (late != 1)}"
        )
    return lines


def held_line(held: Held) -> str:
    """`weights`: how many units on how many servers, and how even."""
    most, least, units = max(held.nbytes), min(held.nbytes), f"{held.units} unit{'s' * (held.units != 1)}"
    if len(held.nbytes) == 1:
        return f"`{held.state}`: {units} on 1 server, {sized(most)}"
    spread = " to ".join(dict.fromkeys((sized(least), sized(most))))
    return (
        f"`{held.state}`: {units} on {len(held.nbytes)} servers, {spread} on each"
        f" (largest / mean {held.balance:.3f})"
    )


def _counted(buffers: Sequence[Buffer]) -> str:
    count = sum(len(buffer.chunks) for buffer in buffers)
    if count == 1:
        return f"1 message of {sized(nbytes_of(buffers))}"
    return f"{count} messages of {sized(nbytes_of(buffers))} in all"


def talk_lines(timing: ServerTiming, topology: Topology) -> list[str]:
    """What a request takes on a topology."""
    where = ", ".join(dict.fromkeys(_place(place, topology) for place in timing.places))
    asked = f"all {timing.workers} workers at once" if timing.kind != "put" else "to arrive"
    times = timing.seconds / timing.bound if timing.bound else 1.0
    bound = f"{times:.2f} times the bound of {timed(timing.bound)}"
    goes_by = f"{'on the' if timing.limit.startswith('links') else 'in'} {timing.limit}"
    lines = [
        f"server{'s' * (timing.servers != 1)} on {where}",
        f"{asked} {timed(timing.seconds)}, {bound}; most of it {goes_by}",
    ]
    if timing.kind in ("exchange", "elastic"):
        busy = f"the busiest server computes {timed(timing.busy)}"
        lines.append(f"one worker alone {timed(timing.alone)}; {busy}")
    return lines


def _place(place: int, topology: Topology) -> str:
    """`host 3`, `host 1 of rack 2`: counted from 0."""
    if topology.hosts:
        return topology.hosts[place // topology.host_places]
    names: list[str] = []
    for level in topology.levels:
        names.append(f"{level.name} {place % level.count}")
        place //= level.count
    return " of ".join(names)


def mode_lines(modes: Sequence[Exchanged], taken: str, period: int, step: float | None) -> list[str]:
    """What each mode of elastic averaging would take, and the share of the time that is communication.

    step: seconds of work in a step; None where nobody knows: then how long it has to be.
    """
    shares = ("of the time", "under a step") if step is not None else _UNKNOWN_STEP
    head = ["", "mode", "all at once", "alone", *shares, "way"]
    return table_lines([head, *(_row(mode, mode.mode == taken, period, step) for mode in modes)])


def every(period: int) -> str:
    return "every step" if period == 1 else f"every {period} steps"


def one_mode(exchange: Exchanged, period: int, step: float | None) -> dict[str, Any]:
    """The same as data: shares of the time, where the seconds of a step are known."""
    content: dict[str, Any] = msgspec.structs.asdict(exchange)
    if step is not None:
        least, most = waiting(exchange, period * step)
        content |= {"share": [least, most], "share_under_a_step": hidden(exchange, period * step, step)}
    return content


def _row(exchange: Exchanged, taken: bool, period: int, step: float | None) -> list[str]:
    alone = timed(exchange.alone) if exchange.mode != "sync" else ""
    cells = [">" if taken else "", exchange.mode, timed(exchange.seconds), alone]
    if step is None:
        waits = least_compute(exchange, TENTH) / period
        under = exchange.seconds / (1 + period * TENTH / (1 - TENTH))
        return [*cells, timed(waits), timed(under), exchange.way]
    least, most = waiting(exchange, period * step)
    share = f"{most:.0%}" if round(least, 2) == round(most, 2) else f"{least:.0%} to {most:.0%}"
    return [*cells, share, f"{hidden(exchange, period * step, step):.0%}", exchange.way]
