"""Programs of plain JAX under `commplan.guard`: the process that blocks the others is named with its line."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import guarded, interpreter, mpirun
from support.campaign import parameters
from support.ports import free_port

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.observe.watchdog import EXIT_STATUS

CULPRIT = guarded.RANKS - 1
LINE = {
    name: next(
        number
        for number, line in enumerate(Path(guarded.__file__).read_text("utf-8").splitlines(), 1)
        if text in line
    )
    for name, text in (("jit", "jnp.sum(x * x)"), ("shard_map", "psum("), ("scaled", "jnp.sum(2 * x)"))
}


def ended(program: str, fault: str, records: Path) -> list[tuple[int, str]]:
    """The status and the output of each process. A stopped one is killed once the others have ended."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "COMMPLAN_RECORDS": str(records),
    }  # fmt: skip
    words = [*interpreter.words(environment), guarded.__file__, program, fault, str(free_port())]
    jobs = [
        subprocess.Popen(
            [*words, str(index)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for index in range(guarded.RANKS)
    ]
    try:
        texts = [job.communicate(timeout=200)[0] for job in jobs[:CULPRIT]]
        if fault == "stop":
            jobs[CULPRIT].kill()
        texts.append(jobs[CULPRIT].communicate(timeout=200)[0])
        return [(job.returncode, text) for job, text in zip(jobs, texts, strict=True)]
    finally:
        for job in jobs:
            job.kill()


@pytest.mark.parametrize("program", ["jit", "shard_map"])
def test_a_stopped_process_is_named_with_the_line_of_the_collective(program: str, tmp_path: Path):
    (status, text), _ = ended(program, "stop", tmp_path)
    assert status == EXIT_STATUS, text
    assert "error[CP0834]: process 1 is stopped (SIGSTOP, or a debugger)" in text
    assert f"guarded.py:{LINE[program]}, in `{'sums' if program == 'jit' else 'summed'}` waits for it" in text


def test_a_process_that_sleeps_is_reported_and_ended_after_its_limit(tmp_path: Path):
    ends = ended("jit", "sleep", tmp_path)
    for status, text in ends:
        assert status == EXIT_STATUS, text
        assert "error[CP0834]: process 1 has not arrived within " in text
        assert "guarded.py" in text and "in go_wrong" in text
    report, error = ends[0][1].partition("error[CP0834]")[::2]
    assert "commplan: process 1 has not arrived within " in report and " in go_wrong, from " in report
    for part in (report, error):
        assert "the limit is 3 s: put longer work into" in part


@pytest.mark.parametrize("fault", parameters(["late"], ["none"]))
def test_a_process_that_announces_longer_work_is_waited_for(fault: str, tmp_path: Path):
    for status, text in ended("jit", fault, tmp_path):
        assert status == 0 and "has made all steps" in text and "CP0834" not in text, text
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_left_out_is_shown_with_both_steps(tmp_path: Path):
    ends = ended("split", "skip", tmp_path)
    assert any(
        "in another order: process 1 `scaled` as call 7, process 0 `sums`" in text for _, text in ends
    ), ends


def test_another_shape_is_refused_with_both_lines(tmp_path: Path):
    for status, text in ended("jit", "shape", tmp_path):
        assert status == EXIT_STATUS, text
        assert "error[CP0854]: process 1 calls `sums` with argument [0]: f32[2, 500]" in text
        assert "process 0 with argument [0]: f32[2, 1000]" in text


@pytest.mark.parametrize("fault", parameters([], ["kill"]))
def test_a_killed_process_is_named(fault: str, tmp_path: Path):
    ends = ended("jit", fault, tmp_path)
    assert ends[1][0] == -signal.SIGKILL
    assert "process 1 " in ends[0][1] and ("has died" in ends[0][1] or "was killed" in ends[0][1])


def test_one_process_gets_jits_own_function():
    step = commplan.guard.jit(lambda x: x + 1, donate_argnums=0)
    assert step(jnp.ones(3))[0] == 2 and isinstance(step, type(jax.jit(lambda x: x)))


@pytest.mark.parametrize(
    "options",
    [{"mesh": 1, "comm": 1}, {"watchdog_s": 0}, {"busy_s": "long"}, {"on_hang": "exit"}, {"timeout": None}],
)
def test_wrong_arguments_are_refused(options: dict[str, Any]):
    with pytest.raises(CommplanError) as caught:
        commplan.guard.jit(lambda x: x, **options)
    assert caught.value.diagnostics[0].code == "CP0857"


def test_a_step_may_be_a_partial_function_and_must_be_a_function():
    assert commplan.guard.jit(functools.partial(jnp.add, 1))(jnp.ones(3))[0] == 2
    assert commplan.guard.jit(donate_argnums=0)(lambda x: x + 1)(jnp.ones(3))[0] == 2
    step: Any = 3
    with pytest.raises(CommplanError) as caught:
        commplan.guard.jit(step)
    assert caught.value.diagnostics[0].code == "CP0857"


PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import commplan
comm = MPI.COMM_WORLD
@commplan.guard.jit(comm=comm, watchdog_s=1.0, busy_s=2.0, on_hang=sys.argv[1])
def step(x):
    return jax.pure_callback(lambda x: comm.allreduce(x), jax.ShapeDtypeStruct((4,), "float32"), x)
x = jnp.ones(4)
for number in range(6):
    if comm.rank == 1 and number == 4:
        time.sleep(600 if sys.argv[1] == "abort" else 8)
    x = step(x).block_until_ready()
"""


def test_ranks_of_a_communicator_are_watched():
    mpirun.needs_mpi()
    done = mpirun.start(2, PROGRAM, "abort")
    assert done.returncode == EXIT_STATUS, done.stderr
    assert "error[CP0834]: process 1 has not arrived within" in done.stderr
    assert "`step` waits for it" in done.stderr


def test_on_hang_report_prints_the_late_process_and_goes_on():
    mpirun.needs_mpi()
    done = mpirun.start(2, PROGRAM, "report")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("commplan: process 1 has not arrived within") == 1
