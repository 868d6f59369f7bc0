"""Readers and members that die or leave during an epoch, and runs that continue elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.sharing import Processes


class Ensemble(Processes):
    """Processes of one run."""

    def __init__(self) -> None:
        super().__init__("visits_process.py")

    def start(self, count: int, each: dict[int, dict[str, Any]] | None = None, **orders: Any) -> None:
        """Start all processes; `each` has instructions for single ones."""
        members = orders["members"]
        members_of = [list(range(i * members // count, (i + 1) * members // count)) for i in range(count)]
        self.begin(
            {
                "index": index,
                "count": count,
                "local": members_of[index],
                **orders,
                **(each or {}).get(index, {}),
            }
            for index in range(count)
        )

    def told(self) -> list[dict[str, Any] | None]:
        """The final output of each process; None for those that were killed."""
        reports = self.ended()
        assert all(code in (0, -9) for code, _ in reports)
        return [json.loads(lines[-1]) if code == 0 else None for code, lines in reports]


@pytest.fixture
def ensemble() -> Iterator[Ensemble]:
    with Ensemble() as processes:
        yield processes


def fine(report: dict[str, Any] | None) -> dict[str, Any]:
    assert report is not None and "error" not in report, report
    assert report["threads"] == []
    return report


def test_exactly_once_whoever_dies_and_wherever_it_goes_on(ensemble: Ensemble) -> None:
    """3 epochs, 7 members, 3 readers, 10,007 records; two readers are killed, one of them in the middle of a
    part; then the rest stop, and a run of 4 processes goes on, by another design."""
    records, members = 10_007, 7
    ensemble.start(
        7,
        {1: {"die_at": 1000}, 0: {"die_after": 60}},
        members=members, records=records, epochs=3, design="multi_broadcast(readers = 3)", until=[1, 50],
    )  # fmt: skip
    first = ensemble.told()
    assert [report is None for report in first] == [True, True] + [False] * 5
    survivors = [fine(report) for report in first if report is not None]
    states = [report["state"] for report in survivors]
    assert all(state == states[0] for state in states) and states[0]["epoch"] == 1
    ensemble.run += "b"
    ensemble.start(4, members=members, records=records, epochs=3, design="all_shared", state=states[0])
    second = [fine(report) for report in ensemble.told()]
    once = Counter(range(records))
    for report in survivors:
        assert Counter(report["seen"]["0"]) == once
    for before in survivors:
        for after in second:
            assert Counter(before["seen"]["1"] + after["seen"]["1"]) == once
            assert Counter(after["seen"]["2"]) == once


def test_heirs_of_heirs_that_made_nothing_before(ensemble: Ensemble) -> None:
    """The only reader dies, then its heir, a mere consumer so far; the last one makes all for itself."""
    ensemble.start(
        3,
        {0: {"die_at": 700}, 1: {"die_after": 25}},
        members=3, records=3001, epochs=2, design="single_broadcast(readers = 1)",
    )  # fmt: skip
    first, second, third = ensemble.told()
    assert first is None and second is None
    report = fine(third)
    assert Counter(report["seen"]["0"]) == Counter(report["seen"]["1"]) == Counter(range(3001))
    assert report["checked"] == 2 * 3001


def test_who_leaves_is_done_without_where_the_plan_says_so(ensemble: Ensemble) -> None:
    ensemble.start(3, {1: {"until": [0, 9]}}, members=3, records=3001, epochs=1, design="all_shared")
    first, leaver, third = (fine(report) for report in ensemble.told())
    assert leaver["state"] == {**first["state"], "epoch": 0, "step": 9}
    for report in (first, third):
        assert Counter(report["seen"]["0"]) == Counter(range(3001))
    assert leaver["seen"]["0"] == first["seen"]["0"][: 9 * 64]


def test_a_member_that_dies_ends_it_for_all_where_the_plan_says_nothing(ensemble: Ensemble) -> None:
    ensemble.start(
        3, {2: {"die_after": 3}}, members=3, records=3001, epochs=1,
        design="single_broadcast(readers = 1)", plan={"hints": "cores = 1"},
    )  # fmt: skip
    first, second, dead = ensemble.told()
    assert dead is None and first is not None
    assert "CP0920" in first["error"] and "process 2 of 3 died" in first["error"] and first["threads"] == []
    assert second is not None and "CP0920" in second["error"], "the reader left"
