"""The protocol of workers and servers: every order of events is tried, and broken servers are found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from commplan.protocol.server import Cell, Machine, Unit
from commplan.protocol.sites import LEAVE
from commplan.protocol.worker import sends
from commplan.verify.protocol import Model, explore, models, sites_of


@pytest.mark.parametrize("model", models(), ids=str)
def test_no_order_of_events_breaks_a_promise(model: Model) -> None:
    found = explore(model)
    assert (found.wrong, found.path) == ("", ())
    assert found.states > 10


ASYNC = Model("elastic", "async", units=2)


def _two_at_once(self: Machine, cell: Cell, unit: Unit) -> list[int]:
    """An update that does not wait for the last worker."""
    return [w for w in cell.members if w not in unit.added and w not in self.gone][:-1]


def _no_turn(self: Machine, cell: Cell, unit: Unit) -> int | None:
    """Whoever comes first, on each unit for itself."""
    return next((worker for worker in cell.members if unit.queue[worker]), None)


BROKEN: list[tuple[str, Model, str, Callable[..., Any], str]] = [
    ("early", Model(), "_due", lambda *_: True, "too early"),
    ("incomplete", Model(workers=3), "_missing", _two_at_once, "without the term of worker 2"),
    ("turnless", Model("elastic", "round_robin"), "_next", _no_turn, "not its turn"),
    ("ticketless", ASYNC, "_next", _no_turn, "in different orders"),
    ("forgetful", Model(deaths=1), "_leave", lambda self, worker: self.gone.add(worker), "waits for ever"),
    ("impatient", Model(puts=2), "_at_mark", lambda *_: False, "waits for ever"),
]


@pytest.mark.parametrize(
    ("model", "method", "instead", "wrong"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_a_broken_server_is_found_out(
    monkeypatch: pytest.MonkeyPatch, model: Model, method: str, instead: Callable[..., Any], wrong: str
) -> None:
    monkeypatch.setattr(Machine, method, instead)
    found = explore(model)
    assert wrong in found.wrong
    assert found.path
    assert all("reaches server" in event or "dies" in event for event in found.path)


def test_a_stale_answer_counts_though_its_worker_leaves_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(staleness=1, deaths=1)
    assert not explore(model).wrong

    def dropped(self: Machine, worker: int) -> None:
        self.gone.add(worker)
        self.backlog[worker].clear()
        for cell in self.cells.values():
            for number, unit in cell.units.items():
                unit.queue[worker].clear()
                self._touched.append((cell, number))  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(Machine, "_leave", dropped)
    assert "lacks a push" in explore(model).wrong or "pushes of worker" in explore(model).wrong


def test_an_unbounded_model_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 50 states"):
        explore(Model("elastic", "hogwild", workers=3), most=50)


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
        assert machine.over
    assert runs[0] == runs[1]
    assert [effect.worker for effect in runs[0] if effect.kind == "pull"] == [2, 0, 1, 2]
