"""A program that binds and runs keeps its hooks, handlers of signals and descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import mpirun, untouched
from support.ports import free_port

WORKER = Path(untouched.__file__)
SAID = ("changed: nothing", "SIGTERM is handled")


def check(text: str) -> None:
    assert all(text.count(line) == 2 for line in SAID), text


def test_a_program_under_mpi_is_left_as_it_is():
    check(mpirun.ended_well(mpirun.started(mpirun.command(2, WORKER, "mpi", forked=False))))


def test_an_uncaught_exception_under_mpi_is_shown_by_the_hook_of_the_program_and_ends_the_job():
    done = mpirun.started(mpirun.command(2, WORKER, "mpi", "raise", forked=False))
    assert done.returncode == 1
    assert "─ Traceback (most recent call last) ─" in done.stderr  # rich draws a box
    assert "ArithmeticError: loss is not finite" in done.stderr


def test_a_program_under_jax_distributed_is_left_as_it_is():
    port, environment = str(free_port()), os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    words = [sys.executable, "-W", "error", str(WORKER), "jax", port]
    jobs = [
        subprocess.Popen([*words, index], env=environment, stdout=subprocess.PIPE, text=True)
        for index in "01"
    ]
    try:
        check("".join(job.communicate(timeout=200)[0] for job in jobs))
        assert [job.returncode for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()


TRAINING = """
import faulthandler, signal
from mpi4py import MPI
from support import untouched

def test_a_training():
    assert faulthandler.is_enabled()  # pytest's
    signal.signal(signal.SIGTERM, handler := lambda *_: None)
    before = untouched.settings()
    untouched.train(MPI.COMM_WORLD)
    assert untouched.settings() == before and signal.getsignal(signal.SIGTERM) is handler
"""


def test_a_training_under_pytest_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "test_training.py").write_text(TRAINING)
    mpirun.needs_mpi()
    program = [str(mpirun.MPIRUN), "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
    words = ["-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)]
    done = mpirun.started([*program, *words])
    assert mpirun.ended_well(done).count("1 passed") == 2


def test_hooks_are_installed_on_request():
    program = (
        "import sys, signal, commplan, untouched\n"
        "before = untouched.settings()\n"
        "commplan.install_hooks()\n"
        "after = untouched.settings()\n"
        "print(sorted(name for name in before if before[name] != after[name]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(WORKER.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    expected = {"sys.exit", "sys.excepthook", "the wake-up descriptor", "signal 6"}
    assert expected <= set(done.stdout.replace("'", "").strip("[]\n").split(", ")), done.stdout


@pytest.mark.parametrize("name", ["sys.exit", "signal 15", "the wake-up descriptor", "faulthandler"])
def test_the_comparison_reads_all_settings(name: str):
    assert name in untouched.settings()
