"""The protocol of workers and servers, explored exhaustively: every order in which messages can arrive.

The servers are those that the runtime runs, `commplan.protocol.server`; workers are what `protocol.sites`
says. First each server is explored alone, which proves what is promised of its own doings beside any number
of others, and that nobody waits for ever (`server_model_check`). Then all servers of the model are explored
together (`product_exploration`): every state that they can be in at one time, each with an event to come if
somebody waits. With `deaths`, workers may die at any moment, and servers hear of it at different ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from commplan.diagnostics import Diagnostic, Note, Span
from commplan.ir.schedule import Schedule
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Site, Sites
from commplan.verify.servers.plan_models import QUICK, Model, sites_of
from commplan.verify.servers.product_exploration import explore_together
from commplan.verify.servers.server_model_check import Graph, explore_server

PROVED = (
    "no worker waits for ever; what was answered has been applied once on every unit; sums have one term of"
    " each living worker in rank order; no answer is staler, and no worker further ahead, than was said;"
    " what is asked after a state is set meets that state, never the one before or after"
)


@dataclasses.dataclass(frozen=True)
class Explored:
    """states: how many there are. wrong: what is wrong, if anything; path: the events that lead there.

    What breaks a promise of one server is told by the events at that server alone.
    """

    model: Model
    states: int
    wrong: str = ""
    path: tuple[str, ...] = ()


def explore(model: Model, *, most: int = 1_000_000_000) -> Explored:
    """Every reachable state of `model`, or the first event that breaks a promise with the way to it.

    Raises ValueError where there are more than `most` states.
    """
    known = sites_of(model)
    graphs: list[Graph] = []
    for server in range(model.servers):
        graph = explore_server(model, known, server, most=most)
        if graph.wrong:
            return Explored(model, len(graph.states), graph.wrong, graph.path)
        graphs.append(graph)
    if model.servers == 1:
        return Explored(model, len(graphs[0].states))
    states, wrong = explore_together(model, known, graphs, most=most)
    return Explored(model, states, wrong)


def models_of(schedule: Schedule) -> tuple[Model, ...]:
    """The models of the kinds, modes and staleness in `schedule`, in quick sizes, in which all may die.

    A worker has two requests or three, and a staleness beyond 1 is explored as 1.
    """
    surveyed = sites(schedule)
    models: dict[Model, None] = {}
    for site in surveyed.all:
        if site.kind in ("exchange", "elastic"):
            models |= dict.fromkeys(_models(site, surveyed))
    return tuple(models)


def _models(site: Site, surveyed: Sites) -> Iterator[Model]:
    read = any(model.kind == "get" for model in surveyed.all)
    acknowledged = site.kind == "exchange" and all(buffer.what != "data" for buffer in site.down)
    stale = None if site.staleness is None else min(1, site.staleness)
    for workers, servers, units, requests in QUICK:
        kind = "exchange" if site.kind == "exchange" else "elastic"
        model = Model(kind, site.mode, workers, servers, units, requests, stale, acknowledged, deaths=workers)
        yield model
        if workers == 2 and servers == 1 and read:
            yield dataclasses.replace(model, gets=True)


def explore_all(models: Sequence[Model]) -> tuple[Explored, ...]:
    """Every model, up to the first in which something is wrong."""
    results: list[Explored] = []
    for model in models:
        results.append(explore(model))
        if results[-1].wrong:
            break
    return tuple(results)


def complaint(explored: Explored, span: Span | None = None, file: str = "") -> Diagnostic:
    """What is wrong, with the events that lead there."""
    events = [Note(f"{number}. {event}") for number, event in enumerate(explored.path, 1)]
    return Diagnostic("CP0765", f"{explored.wrong}, in {explored.model}", span, tuple(events), file=file)
