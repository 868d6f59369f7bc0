"""Batches passed without a copy from their slot: loads whose last batches differ, and many values."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

import numpy as np
from batch_feed import batches
from input_plans import images, schedule
from support import interpreter

SCRIPT = Path(__file__).with_name("zero_copy_process.py")


def test_loads_of_one_flow_are_counted_each_for_itself() -> None:
    run = f"test-{uuid.uuid4().hex[:12]}"
    started = [
        subprocess.Popen(
            [*interpreter.words(jax=False), str(SCRIPT), run, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in started:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert json.loads(output) == [[8, 8], [8, 7]]


def test_only_the_smallest_values_of_a_slot_are_copied() -> None:
    names = [f"x{index}" for index in range(32)]
    program = schedule(
        f"""raw = load images batch 8 visit exactly_once seed 1
        {", ".join(names)} = map columns(raw)
        output {", ".join(names)}""",
        declarations=f"source images : bytes\nfn columns (bytes) -> {', '.join(['u8[64]'] * 32)} on host",
    )
    columns = {"columns": lambda record: [np.full(64, record[0], np.uint8)] * 32}
    with batches(program, images(8), functions=columns) as feed:
        exchange = feed._window.exchange
        assert exchange is not None
        values = next(feed).values.values()
        views = [exchange.slots.offset(array.ctypes.data) is not None for array in values]
    assert len(views) == 32 and views.count(False) <= 2
