"""Rows between hosts over JAX: real processes under jax.distributed, hosts as the division says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import carry_processes, interpreter
from support.ports import free_port

from commplan.diagnostics import Span
from commplan.input.work_partition import division
from commplan.runtime.input.group import Blame
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.transport.jax import JaxCarrier, chain


def run(what: str, count: int, out: Path) -> tuple[list[int], list[dict[str, Any]], str]:
    """Exit codes, and the output of each process (empty if it died)."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    port = str(free_port())
    started = [
        subprocess.Popen(
            [*interpreter.words(environment), carry_processes.__file__, port, str(i), str(count), what, out],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    errors = [one.communicate(timeout=240)[1] for one in started]
    said = [out / f"{i}.json" for i in range(count)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in said]
    return [one.returncode for one in started], found, "\n".join(errors)


def test_every_design_gives_every_host_the_whole_batch(tmp_path: Path):
    codes, said, errors = run("everything", 4, tmp_path)
    assert codes == [0, 0, 0, 0], errors
    assert said[0]["tried"] == len(list(carry_processes.divisions()))  # process 0 leads a host in all of them


def test_a_host_that_dies_is_an_error_on_the_others(tmp_path: Path):
    codes, said, errors = run("lost", 3, tmp_path)
    assert codes[1] == 9
    assert [(one["code"], one["line"]) for one in (said[0], said[2])] == [("CP0940", 7)] * 2, errors
    assert all(one["message"].startswith("batch 9 of the shared input") for one in (said[0], said[2]))


def test_a_silent_host_is_an_error_after_the_timeout(tmp_path: Path):
    _, said, errors = run("silent", 2, tmp_path)
    assert said[0]["code"] == "CP0941", errors
    assert said[0]["message"].endswith("batch 9 of the shared input did not arrive")


def test_a_carrier_that_was_stopped_carries_nothing():
    mover = JaxCarrier(division("all_shared", (0, 1)), 0, (None, None), 1.0, Blame("x", Span(1, 1, 1, 1), ""))
    assert mover.by_caller
    mover.stop()
    with pytest.raises(ClosedError):
        mover.carry(0, [])
    mover.close()


@pytest.mark.parametrize(
    ("ranks", "nbytes", "rounds"), [(2, 1 << 24, 1), (3, 1 << 24, 17), (4, 1 << 24, 34), (4, 1000, 3)]
)
def test_broadcasts_of_large_batches_go_in_slices_down_the_line(ranks: int, nbytes: int, rounds: int):
    assert len(chain(ranks, 0, nbytes).rounds) == rounds
