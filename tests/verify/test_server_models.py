"""The protocol of workers and servers: every order of events is tried, and broken servers are found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.server_models.exploration import explore
from support.server_models.models import WHOLE, Model, models, sites_of
from support.server_models.one_server import Desk, Event, explore_server, legs, stream
from support.server_models.plain import explore_plainly
from support.server_models.together import explore_together

from commplan.protocol.server import Effect, GroupState, Machine, ServedUnit
from commplan.protocol.sites import LEAVE, sends

KINDS = (
    Model(),
    Model(staleness=1),
    Model(staleness=1, acknowledged=True),
    Model(gets=True),
    Model(puts=2),
    Model("elastic", "round_robin"),
    Model("elastic", "async", staleness=0),
    Model("elastic", "async", gets=True),
    Model("elastic", "hogwild"),
)


def sized(workers: int, servers: int, units: int, requests: int, deaths: int = 0) -> list[Model]:
    sizes = {"workers": workers, "servers": servers, "units": units, "requests": requests, "deaths": deaths}
    return [dataclasses.replace(kind, **sizes) for kind in KINDS]


@pytest.mark.parametrize("model", models(), ids=str)
def test_no_order_of_events_breaks_a_promise(model: Model) -> None:
    exploration = explore(model)
    assert (exploration.wrong, exploration.path) == ("", ())
    assert exploration.states > 10


def test_every_worker_may_die_in_every_mode_with_four_workers_and_two_servers() -> None:
    most = [model for model in models(WHOLE) if (model.workers, model.servers) == (4, 2)]
    assert {model.mode for model in most} == {None, "round_robin", "async", "hogwild"}
    assert {model.deaths for model in most} == {4}


# Against the whole, explored without any shortcut


@pytest.mark.parametrize("size", [(2, 1, 2, 2), (3, 1, 1, 1), (2, 2, 1, 2), (2, 3, 1, 1)], ids=str)
def test_states_are_as_many_as_those_of_the_whole(size: tuple[int, int, int, int]) -> None:
    for model in sized(*size)[:: 1 if size[1] < 3 else 3]:
        assert (explore(model).states, "") == explore_plainly(model)


@pytest.mark.parametrize("size", [(2, 1, 2, 2, 2), (3, 1, 1, 1, 3), (2, 2, 1, 1, 1)], ids=str)
def test_deaths_of_which_servers_hear_apart_break_no_more_than_deaths_at_once(
    size: tuple[int, int, int, int, int],
) -> None:
    for model in sized(*size):
        assert explore(model).wrong == explore_plainly(model)[1] == ""


ASYNC = Model("elastic", "async", units=2)


def _two_at_once(self: Machine, state: GroupState, unit: ServedUnit) -> list[int]:
    """An update that does not wait for the last worker."""
    return [w for w in state.members if w not in unit.added and w not in self.departed][:-1]


def _no_turn(self: Machine, state: GroupState, unit: ServedUnit) -> int | None:
    """The first worker to arrive, on each unit separately."""
    return next((worker for worker in state.members if unit.queue[worker]), None)


def _forgotten(self: Machine, worker: int) -> None:
    """The messages of a worker stay, and are processed when possible."""
    self.departed.add(worker)


def _dropped(self: Machine, worker: int) -> None:
    """The queued messages of a worker are dropped with it."""
    self.departed.add(worker)
    self.backlog[worker].clear()
    for state in self.group_states.values():
        for number, unit in state.units.items():
            unit.queue[worker].clear()
            self._touched.append((state, number))  # pyright: ignore[reportPrivateUsage]


def _deaf(self: Machine, worker: int) -> list[Effect]:
    """A death without a reaction."""
    self.departed.add(worker)
    return []


def _unproved(_: Desk) -> None:
    """No property of a server alone is checked."""


BROKEN: dict[str, tuple[Model, str, Callable[..., Any], str]] = {
    "early": (Model(), "_is_due", lambda *_: True, "too early"),
    "incomplete": (Model(workers=3), "_missing", _two_at_once, "without the term of worker 2"),
    "turnless": (Model("elastic", "round_robin"), "_next", _no_turn, "not its turn"),
    "ticketless": (ASYNC, "_next", _no_turn, "in different orders"),
    "forgetful": (Model(deaths=1), "_leave", _forgotten, "waits forever"),
    "impatient": (Model(puts=2), "_has_mark", lambda *_: False, "waits forever"),
    "hasty": (Model("elastic", "hogwild"), "_can_process", lambda *_: True, "meets put 0, not put 1"),
    "hurried": (Model("elastic", "hogwild", puts=2), "_can_put", lambda *_: True, "meets put 2, not put 1"),
    "silent": (Model(), "_is_due", lambda *_: False, "waits forever"),
    "dropping": (Model(staleness=1, deaths=1), "_leave", _dropped, "a push"),
    "deaf": (Model(deaths=1), "lost", _deaf, "waits forever"),
}


@pytest.mark.parametrize(("model", "method", "instead", "wrong"), BROKEN.values(), ids=BROKEN)
def test_a_broken_server_is_found_out(
    monkeypatch: pytest.MonkeyPatch, model: Model, method: str, instead: Callable[..., Any], wrong: str
) -> None:
    monkeypatch.setattr(Machine, method, instead)
    exploration = explore(model)
    assert wrong in exploration.wrong
    assert exploration.path
    assert all("reaches server" in event or "dies" in event for event in exploration.path)
    two_servers = explore(dataclasses.replace(model, servers=2))
    assert two_servers.wrong.split()[0] == exploration.wrong.split()[0]


SEEN = [name for name in BROKEN if name not in ("hasty", "hurried")]  # the whole does not look at puts


@pytest.mark.parametrize(("method", "instead"), [BROKEN[name][1:3] for name in SEEN], ids=SEEN)
def test_what_the_whole_shows_to_be_broken_is_found_broken(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Machine, method, instead)
    count = 0
    for model in (*sized(2, 1, 1, 2, 1), *sized(2, 1, 2, 2), *sized(2, 2, 1, 1)):
        _, wrong = explore_plainly(model)
        assert bool(explore(model).wrong) >= bool(wrong), model
        count += bool(wrong)
    assert count


@pytest.mark.parametrize("name", ["impatient", "silent"])
def test_who_waits_for_ever_is_found_by_servers_together_too(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without the properties of each server alone, the combination shows the deadlock."""
    model, method, instead, _ = BROKEN[name]
    monkeypatch.setattr(Machine, method, instead)
    monkeypatch.setattr(Desk, "_progress", _unproved)
    model = dataclasses.replace(model, servers=2)
    sites = sites_of(model)
    graphs = [explore_server(model, sites, server, most=10_000) for server in range(2)]
    assert not any(graph.wrong for graph in graphs)
    _, stuck = explore_together(model, sites, graphs, most=100_000)
    assert "a worker waits forever" in stuck
    monkeypatch.undo()
    assert not explore(model).wrong


def test_the_way_to_what_is_wrong_is_a_shortest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "_is_due", BROKEN["early"][2])
    assert explore(Model(units=2, deaths=2)).path == ("a message of worker 0 reaches server 0",) * 3


def test_a_stale_answer_counts_though_its_worker_leaves_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(staleness=1, deaths=1)
    assert not explore(model).wrong
    monkeypatch.setattr(Machine, "_leave", _dropped)
    assert "lacks a push" in explore(model).wrong or "pushes of worker" in explore(model).wrong


@pytest.mark.parametrize("servers", [1, 2])
def test_an_unbounded_model_is_refused(servers: int) -> None:
    with pytest.raises(ValueError, match="more than 50 states"):
        explore(Model("elastic", "hogwild", workers=3, servers=servers, requests=2), most=50)


# Workers


def test_a_leg_ends_with_what_a_worker_waits_for() -> None:
    model = Model(gets=True, puts=2, servers=2)
    sites = sites_of(model)
    assert legs(model, sites) == ((0, 1), (2,), (0, 1), (2,), ())
    of = {worker: [stream(model, sites, worker, server) for server in (0, 1)] for worker in (0, 1)}
    assert [message.leg for message in of[1][1]] == [0, 0, 1, 2, 2, 3, 4]
    assert of[1][1][-1].tag == LEAVE
    assert [len(message.opens) for message in of[0][0]] == [0, 1, 1, 0, 1, 1, 0]
    assert of[0][0][0].tag != of[1][0][0].tag  # one puts, the other says that it has come there


def test_a_worker_that_died_sends_nothing_and_one_that_left_does_not_die() -> None:
    model = Model(deaths=2)
    server = Desk(model, sites_of(model), 0).after(Event(1, dies=True))
    assert {event.worker for event in server.events()} == {0}
    while (event := Event(0, dies=False)) in list(server.events()):
        server = server.after(event)
    assert list(server.events()) == []
    assert server.machine.all_departed


def test_the_same_messages_in_the_same_order_have_the_same_effects() -> None:
    sites = sites_of(Model("elastic", "async", workers=3))
    order = [(0, m.tag) for m in sends(sites.all[0], first=True)]
    order += [(w, m.tag) for w in (1, 2) for m in sends(sites.all[0], first=False)]
    order += [(w, m.tag) for w in (2, 0, 1, 2) for m in sends(sites.all[1], first=w == 0)]
    order += [(w, LEAVE) for w in range(3)]
    runs = []
    for _ in range(2):
        machine = Machine(sites, 0)
        runs.append([effect for worker, tag in order for effect in machine.arrive(worker, tag)])
        assert machine.all_departed
    assert runs[0] == runs[1]
    assert [effect.worker for effect in runs[0] if effect.kind == "pull"] == [2, 0, 1, 2]
