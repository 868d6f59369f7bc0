"""Records in a folder of the test, and conditions of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan.sidecar import states


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))


@pytest.fixture(name="conditions")
def _conditions(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The conditions of processes by number; the others are alive."""
    conditions: dict[int, str] = {}
    monkeypatch.setattr(states, "process_state", lambda number: conditions.get(number, "alive"))
    return conditions
