"""Describes states on servers, the traffic between workers and servers, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from commplan.cost import Predictor
from commplan.cost.schedule.server_traffic import (
    ElasticTiming,
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
from commplan.protocol.sites import Buffer, Site, Sites, StateDistribution, nbytes_of
from commplan.topology import Topology

TENTH = 0.1  # share of communication for which step times are shown if the step is unknown
_UNKNOWN_STEP = ("10% if steps take", "or, under a step,")  # headings of these step times


class ServerText(msgspec.Struct, frozen=True):
    """The text for one line of the plan.

    Attributes:
        lines: The lines of text.
        sent: The bytes that the busiest worker sends to servers; 0 if workers may use the servers' memory
            directly.
    """

    lines: tuple[str, ...] = ()
    sent: int = 0


ServerTexts = dict[tuple[str, Span], ServerText]  # by name of the phase and location of the stage


def server_lines(schedule: Schedule, predictor: Predictor | None) -> ServerTexts:
    """The texts about servers and elastic averaging.

    Without a predictor there are no times, and no texts about elastic averaging without servers.

    Raises:
        CommplanError: As `commplan.protocol.build_sites.sites`.
    """
    all_sites = sites(schedule)
    texts: dict[tuple[str, Span], ServerText] = {}
    periods = {phase.name: phase.period for phase in schedule.phases}

    def add(key: tuple[str, Span], lines: Sequence[str], sent: int = 0) -> None:
        before = texts.get(key, ServerText())
        texts[key] = ServerText((*before.lines, *lines), before.sent + sent)

    for site in all_sites.all:
        lines = [f"{title(site)}:", *(f"  {line}" for line in site_lines(site, all_sites))]
        if predictor is not None:
            timing, _ = server_timing(site, all_sites, predictor, periods[site.phase])
            lines += [f"  {line}" for line in server_time_lines(timing, predictor.network.topology)]
            alternatives = alternatives_to_servers(predictor, site, all_sites)
            lines += [f"  instead: {text}: {timed(seconds)}" for text, seconds in alternatives]
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
    """Titles such as `exchange with hub` and `elastic async with master`."""
    kind = f"elastic {site.mode}" if site.kind == "elastic" else site.kind
    preposition = {"get": "from", "put": "on"}.get(site.kind, "with")
    return f"{kind} {preposition} {site.server}"


def site_lines(site: Site, all_sites: Sites) -> list[str]:
    """The states of a site and its traffic. `all_sites` are those of the schedule."""
    lines = [state_line(distribution) for distribution in site.distributions]
    up, down = _message_text(site.up), _message_text(site.down)
    sender = "the first worker of each group" if site.kind == "put" and site.per else "each worker"
    sender = "the first worker" if site.kind == "put" and not site.per else sender
    lines.append(f"{sender} sends {up} and " + (f"gets {down}" if site.down else "expects no answer"))
    if site.token:
        other_workers = all_sites.workers - len(all_sites.members(site))
        if other_workers == 1:
            lines.append(f"the other worker sends {_message_text(site.token)}")
        elif other_workers:
            lines.append(f"each of the other {other_workers} workers sends {_message_text(site.token)}")
    if site.kind == "exchange":
        staleness = site.staleness or 0
        lines.append(
            "each waits for the terms of all workers"
            if not staleness
            else f"each runs ahead of the slowest by at most {staleness} exchange{'s' * (staleness != 1)}"
        )
    return lines


def state_line(distribution: StateDistribution) -> str:
    """The number of units of a state, the number of servers, and the balance."""
    largest = max(distribution.nbytes)
    smallest = min(distribution.nbytes)
    units = f"{distribution.units} unit{'s' * (distribution.units != 1)}"
    if len(distribution.nbytes) == 1:
        return f"`{distribution.state}`: {units} on 1 server, {sized(largest)}"
    sizes_text = " to ".join(dict.fromkeys((sized(smallest), sized(largest))))
    return (
        f"`{distribution.state}`: {units} on {len(distribution.nbytes)} servers, {sizes_text} on each"
        f" (largest / mean {distribution.balance:.3f})"
    )


def _message_text(buffers: Sequence[Buffer]) -> str:
    """The number of messages and their bytes, as text."""
    count = sum(len(buffer.chunks) for buffer in buffers)
    if count == 1:
        return f"1 message of {sized(nbytes_of(buffers))}"
    return f"{count} messages of {sized(nbytes_of(buffers))} in all"


def server_time_lines(timing: ServerTiming, topology: Topology) -> list[str]:
    """The time of a request on a topology."""
    places = ", ".join(dict.fromkeys(_place(place, topology) for place in timing.places))
    subject = f"all {timing.workers} workers at once" if timing.kind != "put" else "to arrive"
    times = timing.seconds / timing.bound if timing.bound else 1.0
    bound = f"{times:.2f} times the bound of {timed(timing.bound)}"
    bottleneck = f"{'on the' if timing.limit.startswith('links') else 'in'} {timing.limit}"
    lines = [
        f"server{'s' * (timing.servers != 1)} on {places}",
        f"{subject} {timed(timing.seconds)}, {bound}; most of it {bottleneck}",
    ]
    if timing.kind in ("exchange", "elastic"):
        busy = f"the busiest server computes {timed(timing.busy)}"
        lines.append(f"one worker alone {timed(timing.alone)}; {busy}")
    return lines


def _place(place: int, topology: Topology) -> str:
    """The name of a place: its host if the topology lists hosts, else such as `gpu 3 of host 1`, from 0."""
    if topology.hosts:
        return topology.hosts[place // topology.host_places]
    names: list[str] = []
    for level in topology.levels:
        names.append(f"{level.name} {place % level.count}")
        place //= level.count
    return " of ".join(names)


def mode_lines(modes: Sequence[ElasticTiming], selected: str, period: int, step: float | None) -> list[str]:
    """A table of the modes of elastic averaging: their times, and the share of time for communication.

    Args:
        modes: The modes with their times.
        selected: The mode of the plan, which is marked.
        period: The number of steps between two exchanges.
        step: The seconds of computation in a step. If it is None, the table has the least seconds for which
            communication takes 10% of the time.
    """
    shares = ("of the time", "under a step") if step is not None else _UNKNOWN_STEP
    head = ["", "mode", "all at once", "alone", *shares, "way"]
    return table_lines([head, *(_row(mode, mode.mode == selected, period, step) for mode in modes)])


def every(period: int) -> str:
    """The period of a phase in words."""
    return "every step" if period == 1 else f"every {period} steps"


def one_mode(exchange: ElasticTiming, period: int, step: float | None) -> dict[str, Any]:
    """A mode as data, with shares of time unless `step` is None; arguments as `mode_lines`."""
    content: dict[str, Any] = msgspec.to_builtins(exchange)
    if step is not None:
        minimum, maximum = waiting(exchange, period * step)
        content |= {"share": [minimum, maximum], "share_under_a_step": hidden(exchange, period * step, step)}
    return content


def _row(exchange: ElasticTiming, is_selected: bool, period: int, step: float | None) -> list[str]:
    """The cells of a mode in the table of `mode_lines`."""
    alone = timed(exchange.alone) if exchange.mode != "sync" else ""
    cells = [">" if is_selected else "", exchange.mode, timed(exchange.seconds), alone]
    if step is None:
        minimum_step = least_compute(exchange, TENTH) / period
        # Solve (seconds - step) / (period * step + seconds - step) = TENTH for `step`.
        overlapped_step = exchange.seconds / (1 + period * TENTH / (1 - TENTH))
        return [*cells, timed(minimum_step), timed(overlapped_step), exchange.implementation]
    minimum, maximum = waiting(exchange, period * step)
    share = f"{maximum:.0%}" if round(minimum, 2) == round(maximum, 2) else f"{minimum:.0%} to {maximum:.0%}"
    return [*cells, share, f"{hidden(exchange, period * step, step):.0%}", exchange.implementation]
