"""A state that is set again waits for all workers that live: it names those that do not come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.server_jobs import Job, compiled

from commplan.diagnostics import CommplanError
from commplan.runtime.param_server.serve import PutTimeout

TEXT = """
plan sets
axis worker = 3
server hub = 1
input params : f32[8] per worker
state weights : f32[8] on hub
at start {
    weights = broadcast params over worker from 0
}
phase again {
    weights = broadcast params over worker from 0
}
"""


def test_workers_that_do_not_come_are_named(tmp_path: Path):
    job = Job(compiled(tmp_path, TEXT, {}), {})
    (driver,) = job.drivers
    awaited = PutTimeout(driver, 0.0)
    values = {"weights": np.ones(8, np.float32)}
    for phase, workers in (("start", (0, 1, 2)), ("again", (0, 1))):
        assert awaited.message() == "", phase
        for worker in workers:
            job.ask(worker, job.site("put", phase), values)
            while job.wires[worker, 0]:
                job.deliver(worker, 0)
    with pytest.raises(CommplanError, match="worker 2 did not reach that line") as error:
        awaited.message()
    assert error.value.diagnostics[0].code == "CP0981"
    driver.lost(2)
    assert awaited.message() == ""


def test_a_server_knows_whose_messages_wait_and_who_has_none_there(tmp_path: Path):
    job = Job(compiled(tmp_path, TEXT, {}), {})
    (driver,) = job.drivers
    values = {"weights": np.ones(8, np.float32)}
    assert driver.machine.blocked_workers() == ([], [0, 1, 2])
    for phase, workers in (("start", (0, 1, 2)), ("again", (0, 1))):
        for worker in workers:
            job.ask(worker, job.site("put", phase), values)
            while job.wires[worker, 0]:
                job.deliver(worker, 0)
    assert driver.machine.blocked_workers() == ([0, 1], [2])
    driver.lost(2)
    assert driver.machine.blocked_workers() == ([], [0, 1])
