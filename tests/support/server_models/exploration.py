"""The protocol of workers and servers, explored exhaustively: every order in which messages can arrive.

The servers are those that the runtime runs, `commplan.protocol.server`; workers are what `protocol.sites`
says. First each server is explored alone, which proves what is promised of its own doings beside any number
of others, and that nobody waits for ever (`one_server`). Then all servers of the model are explored
together (`together`): every state that they can be in at one time, each with an event to come if
somebody waits. With `deaths`, workers may die at any moment, and servers hear of it at different ones.
"""

from __future__ import annotations

import dataclasses

from .models import Model, sites_of
from .one_server import Graph, explore_server
from .together import explore_together


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
