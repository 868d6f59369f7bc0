"""Readers and members that die or leave in the middle of an epoch, and runs that go on elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("data_visits.py")
SHARED = Path("/dev/shm")


class Ensemble:
    """Processes of one run."""

    def __init__(self) -> None:
        self.run = f"test-{uuid.uuid4().hex[:12]}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, count: int, each: dict[int, dict[str, Any]] | None = None, **orders: Any) -> None:
        """All processes; `each` has what only some are told."""
        members = orders["members"]
        self.processes = []
        for index in range(count):
            held = list(range(index * members // count, (index + 1) * members // count))
            own = {"run": self.run, "index": index, "count": count, "local": held, **orders}
            own |= (each or {}).get(index, {})
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "error", str(SCRIPT), json.dumps(own)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def told(self) -> list[dict[str, Any] | None]:
        """What each said in the end; None of those that were killed."""
        found: list[dict[str, Any] | None] = []
        for process in self.processes:
            out, err = process.communicate(timeout=120)
            assert err == "", err
            assert process.returncode in (0, -9)
            found.append(json.loads(out.splitlines()[-1]) if process.returncode == 0 else None)
        return found


@pytest.fixture
def ensemble() -> Iterator[Ensemble]:
    made = Ensemble()
    try:
        yield made
        assert not list(SHARED.glob(f"commplan-*{made.run}*")), "nothing stays in shared memory"
    finally:
        for process in made.processes:
            process.kill()
            process.communicate()


def fine(said: dict[str, Any] | None) -> dict[str, Any]:
    assert said is not None and "error" not in said, said
    assert said["threads"] == []
    return said


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
    assert [said is None for said in first] == [True, True] + [False] * 5
    survivors = [fine(said) for said in first if said is not None]
    states = [said["state"] for said in survivors]
    assert all(state == states[0] for state in states) and states[0]["epoch"] == 1
    ensemble.run += "b"
    ensemble.start(4, members=members, records=records, epochs=3, design="all_shared", state=states[0])
    second = [fine(said) for said in ensemble.told()]
    once = Counter(range(records))
    for said in survivors:
        assert Counter(said["seen"]["0"]) == once
    for before in survivors:
        for after in second:
            assert Counter(before["seen"]["1"] + after["seen"]["1"]) == once
            assert Counter(after["seen"]["2"]) == once
