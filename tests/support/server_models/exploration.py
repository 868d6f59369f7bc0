"""The protocol of workers and servers, explored exhaustively: every order of message arrivals.

The servers are those of the runtime, `commplan.protocol.server`; workers follow `protocol.sites`. First each
server is explored alone, which proves its properties for any number of servers, and the absence of deadlock
(`one_server`). Then all servers of the model are explored together (`together`): every reachable combination
of states has a next event if any worker waits. With `deaths`, workers may die at any time, and each server
detects it at a different time.
"""

from __future__ import annotations

import dataclasses

from .models import Model, sites_of
from .one_server import Graph, explore_server
from .together import explore_together


@dataclasses.dataclass(frozen=True)
class Explored:
    """`states`: their number. `wrong`: the error, if any; `path`: the events that lead to it.

    For an error of one server the events are those at that server.
    """

    model: Model
    states: int
    wrong: str = ""
    path: tuple[str, ...] = ()


def explore(model: Model, *, most: int = 1_000_000_000) -> Explored:
    """Explore every reachable state of `model`, or find the first event that violates a property, with its
    path.

    Raises:
        ValueError: if there are more than `most` states.
    """
    sites = sites_of(model)
    graphs: list[Graph] = []
    for server in range(model.servers):
        graph = explore_server(model, sites, server, most=most)
        if graph.wrong:
            return Explored(model, len(graph.states), graph.wrong, graph.path)
        graphs.append(graph)
    if model.servers == 1:
        return Explored(model, len(graphs[0].states))
    states, wrong = explore_together(model, sites, graphs, most=most)
    return Explored(model, states, wrong)
