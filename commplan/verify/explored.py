"""Which models of the protocol stand for what a plan says to its servers, and what exploring them proves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from commplan.diagnostics import Diagnostic, Note, Span
from commplan.ir.schedule import Schedule
from commplan.protocol.sites import Site, Sites
from commplan.protocol.survey import sites
from commplan.verify.protocol import Explored, explore
from commplan.verify.protocol_models import QUICK, Model

PROVED = (
    "no worker waits for ever; what was answered has been applied once on every unit; sums have one term of"
    " each living worker in rank order; no answer is staler, and no worker further ahead, than was said;"
    " what is asked after a state is set meets that state, never the one before or after"
)


def models_of(schedule: Schedule) -> tuple[Model, ...]:
    """The models of the kinds, modes and staleness in `schedule`, in quick sizes, in which all may die.

    A worker has two requests or three, and a staleness beyond 1 is explored as 1.
    """
    surveyed = sites(schedule)
    found: dict[Model, None] = {}
    for site in surveyed.all:
        if site.kind in ("exchange", "elastic"):
            found |= dict.fromkeys(_models(site, surveyed))
    return tuple(found)


def _models(site: Site, surveyed: Sites) -> Iterator[Model]:
    read = any(one.kind == "get" for one in surveyed.all)
    acknowledged = site.kind == "exchange" and all(buffer.what != "data" for buffer in site.down)
    stale = None if site.staleness is None else min(1, site.staleness)
    for workers, servers, units, requests in QUICK:
        kind = "exchange" if site.kind == "exchange" else "elastic"
        one = Model(kind, site.mode, workers, servers, units, requests, stale, acknowledged, deaths=workers)
        yield one
        if workers == 2 and servers == 1 and read:
            yield dataclasses.replace(one, gets=True)


def explore_all(models: Sequence[Model]) -> tuple[Explored, ...]:
    """Every model, up to the first in which something is wrong."""
    found: list[Explored] = []
    for model in models:
        found.append(explore(model))
        if found[-1].wrong:
            break
    return tuple(found)


def complaint(one: Explored, span: Span | None = None, file: str = "") -> Diagnostic:
    """What is wrong, with the events that lead there."""
    events = [Note(f"{number}. {event}") for number, event in enumerate(one.path, 1)]
    return Diagnostic("CP0765", f"{one.wrong}, in {one.model}", span, tuple(events), file=file)
