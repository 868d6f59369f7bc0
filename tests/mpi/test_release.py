"""Unreferenced runs return their communicators, records and threads, whenever each rank collects them; a
function compiled for a run keeps it alive."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from support import mpirun

mpirun.needs_mpi()

BEGIN = """
import collections, gc, os
from pathlib import Path
from mpi4py import MPI
import jax, numpy as np
import commplan
comm = MPI.COMM_WORLD
program = commplan.loads('''
plan p
axis data = ?
input x : f32[100] partial data
each step {
    y = reduce x over data by sum
    z = reduce x over data by mean via native
    output y, z
}
''').compile(comm)
x = np.ones(100, np.float32)
def handles():  # the lowest number that no communicator of this process has
    probe = comm.Dup()
    number = probe.py2f()
    probe.Free()
    return number
def summed(run, jit):
    return jit(lambda x: run.step({}, x=x)[0].y)
"""
MANY = (
    BEGIN
    + """
gc.disable()  # each rank collects at another time, one of them with other runs still in use
kept = collections.deque(maxlen=1 + 15 * comm.rank)
before = handles()
for number in range(160):
    run = program.bind(comm)
    kept.append(run)
    if number % 40 == 0:
        assert (np.asarray(summed(run, run.jit if number % 80 else jax.jit)(x)) == 2).all()
    if number % (12 + 8 * comm.rank) == 0:
        gc.collect()
after = handles()
assert after < before + 240, (before, after)  # each run has three communicators
records = list(Path(os.environ['COMMPLAN_RECORDS']).iterdir())
assert len(records) < 100, len(records)
assert len(os.listdir('/proc/self/task')) < 60
print('done')
"""
)
USED = (
    BEGIN
    + """
def used(is_of_run):
    run = program.bind(comm)
    step = summed(run, run.jit if is_of_run else jax.jit)
    in_flight = [step(np.ones(100, np.float32) * number) for number in range(20)]
    return step, step.lower(x).compile(), in_flight, run.context.backend.channel.recording.path
def is_released(record):  # a call of `bind` frees the runs that all ranks have dropped before
    for _ in range(30):
        program.bind(comm)
        gc.collect()
        if not comm.allreduce(record.exists()):
            return True
    return False
for is_of_run in (False, True):
    step, compiled, in_flight, record = used(is_of_run)
    other = used(is_of_run)[-1]
    assert is_released(other) and record.exists()
    assert (np.asarray(compiled(x)) == 2).all() and (np.asarray(step(x)) == 2).all()
    assert [float(y[0]) for y in in_flight] == [2.0 * number for number in range(20)]
    del compiled, step, in_flight
    assert is_released(record)
print('done')
"""
)


SERVED = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    """
import gc, os
from pathlib import Path
from mpi4py import MPI
from servers_worker import ELASTIC, TREE
import commplan
comm = MPI.COMM_WORLD
text = ELASTIC.format(servers=1, mode=sys.argv[1], eta="0.25", hints="")
program = commplan.loads(text).compile(comm, shapes={"params": TREE, "center": TREE})
def handles():  # the lowest number that no communicator of this process has
    probe = comm.Dup()
    number = probe.py2f()
    probe.Free()
    return number
before = handles()
for _ in range(20):
    run = program.bind(comm)
    if run.serve() is None:
        _, state = run.start(run.init(), params=TREE)
        run.step(state, params=TREE)
        run.close()
        del state
    del run
    gc.collect()
after = handles()
assert after < before + 20, (before, after)  # each run has two communicators or more
records = list(Path(os.environ['COMMPLAN_RECORDS']).iterdir())
assert len(records) < 20, len(records)
print('done')
"""
)


def ended_well(code: str, records: Path, *words: str, timeout: float = 240) -> None:
    with mock.patch.dict("os.environ", COMMPLAN_RECORDS=str(records)):
        assert mpirun.run(2, code, *words, timeout=timeout).split() == ["done", "done"]


def test_a_process_binds_as_often_as_it_likes(tmp_path: Path):
    ended_well(MANY, tmp_path, timeout=600)


def test_what_was_compiled_for_a_run_outlives_the_name_of_it(tmp_path: Path):
    ended_well(USED, tmp_path)


@pytest.mark.parametrize("mode", ["async", "hogwild"])
def test_runs_with_servers_are_freed_on_workers_and_servers(mode: str, tmp_path: Path):
    ended_well(SERVED, tmp_path, mode)
