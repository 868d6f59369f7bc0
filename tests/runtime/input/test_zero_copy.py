"""Batches passed without a copy from their slot, for loads whose last batches differ."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

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
