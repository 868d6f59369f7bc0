"""Under a fault-tolerant MPI, every waiting rank reports the dead rank and the line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support import mpirun
from support.campaign import parameters

from bench.faults import servers
from bench.faults.campaign import Fault
from bench.harness.mpirun import ULFM

mpirun.needs_mpi()

WORKER = Path(__file__).parent / "faults_worker.py"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun.fork_benches(monkeypatch)


def played(ranks: int, case: str) -> tuple[dict[str, list[str]], subprocess.CompletedProcess[str]]:
    """The error messages of the survivors, by their waits."""
    command = mpirun.command(ranks, WORKER, case)
    done = mpirun.started([command[0], *ULFM, *command[1:]])
    answers: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        outcome, colon, remainder = line.partition(": ")
        if colon:
            answers.setdefault(outcome, []).append(remainder)
    return answers, done


def test_every_survivor_of_a_collective_is_told_who_died_and_where():
    """This includes ranks that wait for live ranks that wait for the dead one."""
    answers, done = played(4, "collectives")
    for case in ("native call", "native split", "ring call", "ring split"):
        assert len(answers[case]) == 3, done.stderr
        assert all("rank 2 has died; line 7 of x.plan" in each for each in answers[case]), answers[case]
    assert len(answers["plan"]) == 3
    message = "reduces.plan:6:5: error[CP0834]: rank 2 has died note: line 6 of reduces.plan waits for it"
    assert answers["plan"] == [message] * 3, answers
    assert all("an earlier operation failed: rank 2 has died" in each for each in answers["again"]), answers


def test_a_rank_that_died_before_a_program_is_bound_is_named():
    answers, done = played(4, "before_bind")
    assert len(answers["bind"]) == len(answers["compile"]) == 3, done.stderr
    for each in (*answers["bind"], *answers["compile"]):
        assert "error[CP0834]: rank 2 of 4 has died" in each, answers


def test_workers_of_a_dead_server_are_told_which():
    answers, done = played(3, "server_dies")
    message = (
        "asks.plan:11:5: error[CP0834]: server `master` (rank 2) has died note: line 11 of asks.plan waits"
    )
    assert len(answers["worker"]) == len(answers["again"]) == 2, done.stderr
    assert all(message in each for each in (*answers["worker"], *answers["again"])), answers


def test_a_state_that_is_set_again_waits_with_the_patience_of_its_server():
    """The server bounds this wait by half an hour."""
    answers, done = played(3, "put_waits")
    assert answers["put 0"] == answers["put 1"] == ["nothing", "nothing"], done.stderr


def test_a_dead_worker_does_not_stop_the_others():
    answers, done = played(4, "worker_dies")
    assert answers["worker"] == ["nothing", "nothing"], done.stderr
    assert answers["served"] == ["lost (1,), broken off {}"]


def test_a_server_learns_why_a_worker_ends():
    answers, done = played(3, "worker_raises")
    assert answers["worker"] == ["nothing"], done.stderr
    assert answers["served"] == ["lost (), broken off {1: 'ValueError: out of luck'}"]


@pytest.mark.parametrize(("culprit", "via"), parameters([(0, "sync")], [(1, "async"), (2, "async")]))
def test_who_is_stopped_is_named_at_servers(culprit: int, via: str):
    """The server (2), a worker that the server waits for, and one that blocks others only at the end.

    A server that is stopped while all workers wait for it: `test_recorded_servers`.
    """
    outcome = servers.judged(Fault("servers", "stop", culprit, 8, 1000, via))
    assert outcome.ended and outcome.right, outcome.text


@pytest.mark.parametrize(("culprit", "via"), parameters([(2, "sync"), (0, "async")], [(0, "sync")]))
def test_a_server_or_worker_that_does_something_else_is_named(culprit: int, via: str):
    """A sleeping worker blocks the others if the server waits for it; otherwise all of them finish."""
    outcome = servers.judged(Fault("servers", "sleep", culprit, 12, 1000, via))
    assert outcome.ended and outcome.right, outcome.text
