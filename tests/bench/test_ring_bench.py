"""The bench of shared input against a hand-written ring: contents are compared, and the table names
differences."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from bench.input.records import Packed, pack
from bench.input.turns import Figure
from bench.ring import __main__ as ring
from bench.ring.member import BATCH, Notes, expected

for _package in ("PIL", "sklearn", "skimage"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)


def test_notes_tell_batches_apart():
    def checksum(*batches: dict[str, np.ndarray]) -> int:
        notes = Notes()
        for batch in batches:
            notes.add(batch)
        return notes.checksum

    def batch(number: int = 0, cell: int = 0) -> dict[str, np.ndarray]:
        pixels, ids = np.zeros((2, 224, 224, 3), np.uint8), np.arange(2, dtype=np.int32)
        pixels[1, 0, 0, 0], ids[1] = cell, number
        return {"pixels": pixels, "ids": ids}

    sums = {checksum(batch()), checksum(batch(5)), checksum(batch(cell=1)), checksum(batch(), batch())}
    assert len(sums) == 4


def test_epochs_differ(tmp_path: Path):
    records = tmp_path / "records.bin"
    pack(records, BATCH)
    assert expected(Packed(records), 0) != expected(Packed(records), 1)


def test_members_of_a_feed_and_of_the_ring_are_given_what_the_plan_says(tmp_path: Path):
    options = ring.options_of(
        ["--members", "2", "--records", "32", "--rounds", "1", "--cores", "1", "--systems", "ring,feed"]
    )
    figures = ring.measure(options, tmp_path)
    assert [figure.system for figure in figures] == ["ring", "feed"]
    assert all(
        figure.wrong == 0 and figure.cpu_s[0] > 0 and figure.memory > figure.private > 0 for figure in figures
    )
    assert ring.table(figures).count("as the plan says") == 2
    spoiled = Figure("feed", [1.0], [1.0], latency_s=[1.0], memory=10**9, private=10**9, wrong=3)
    assert "3 epochs of members wrong" in ring.table([figures[0], spoiled])
