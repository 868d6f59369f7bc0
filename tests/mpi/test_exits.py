"""Ranks that end with steps in flight end without errors; one that ends early does not block the others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import mpirun
from support.campaign import parameters

from bench import exits
from bench.faults import mpi
from bench.faults.campaign import Fault
from bench.harness.mpirun import ULFM

mpirun.needs_mpi()

EARLY = """
import pathlib, sys, time
import jax, numpy as np
from mpi4py import MPI
from commplan.hang_limits import HangLimits
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec
algorithm, form, rest, told = *sys.argv[1:4], pathlib.Path(sys.argv[4])
class Slow:
    # What Python drops after its exit handlers, and before it ends MPI; the others need not wait for that.
    def __del__(self, told=told, time=time, print=print):
        until = time.monotonic() + 30
        while not told.exists():
            if time.monotonic() > until:
                print("nobody is told until MPI ends", flush=True)
                return
            time.sleep(0.01)
channel = Channel(MPI.COMM_WORLD, limits=HangLimits(1.5 if rest == "watched" else None), plan="p")
spec = Spec("all_reduce", algorithm=Algorithm(algorithm), form=form, line=6, file="x.plan")
step = jax.jit(lambda x, token: channel.run(x, spec, token)[0])
ys = []
try:
    for _ in range(4 if MPI.COMM_WORLD.rank == 1 else 8):
        ys.append(step(np.ones(300_000, np.float32), channel.token()))
    if rest in ("awaited", "watched"):
        jax.block_until_ready(ys)
except (ValueError, RuntimeError) as error:
    print("told:", error, flush=True)
    told.touch()
if MPI.COMM_WORLD.rank == 1 and rest == "awaited":
    slow = Slow()
if MPI.COMM_WORLD.rank == 1 and rest == "finalized":
    MPI.Finalize()
"""
GONE = "the program has ended on rank 1; line 6 of x.plan waits for it"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun.fork_benches(monkeypatch)


@pytest.mark.parametrize(("count", "how"), [(12, ()), (3, ("--ulfm",))])
def test_steps_in_flight_end_before_mpi_does(
    count: int, how: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    """With small messages: the next test."""
    status, out = exits.main(["--count", str(count), "--json", *how]), capsys.readouterr().out
    assert status == 0, out
    report = json.loads(out)
    assert report["problems"] == [] and report["exits"] == count
    assert report["with_a_failing_rank"] == count // 12


def test_a_campaign_goes_on_where_it_was_left(tmp_path: Path):
    file = tmp_path / "launches.jsonl"
    launch = {"way": "kept", "culprit": -1, "ulfm": False, "elements": 1000, "seconds": 0.5, "problem": ""}
    lines = [json.dumps({"number": number} | launch) for number in range(3)]
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    words = ["--count", "12", "--elements", "1000", "--resume", str(file), "--json"]
    assert exits.main(words) == 0
    assert [json.loads(line)["number"] for line in file.read_text("utf-8").splitlines()] == [0, 1, 2, 3]
    assert json.loads(file.read_text("utf-8").splitlines()[3])["way"] == "raises"


def test_who_survives_a_killed_rank_may_end_well_if_that_is_said():
    assert exits._wrong("killed", 0, "rank 2 has died", ulfm=True) == ""
    assert exits._wrong("killed", 0, "", ulfm=True) == "it is not said why"
    assert exits._wrong("killed", 0, "rank 2 has died", ulfm=False) == "exit code 0"
    assert exits._wrong("raises", 0, "loss is not finite", ulfm=True) == "exit code 0"


def early(
    folder: Path, algorithm: str, form: str, ending: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    command = mpirun.command(3, EARLY, algorithm, form, ending, folder / "told")
    return mpirun.started([command[0], *options, *command[1:]])


@pytest.mark.parametrize(
    ("algorithm", "form", "ending", "options"),
    parameters(
        [
            ("ring", "call", "finalized", []),
            ("ring", "split", "awaited", []),
            ("ring", "call", "left alone", []),
            ("native", "call", "awaited", ULFM),
        ],
        [
            ("ring", "call", "awaited", []),
            ("ring", "call", "awaited", ULFM),
            ("native", "split", "awaited", ULFM),
        ],
    ),
)
def test_who_waits_for_a_rank_that_has_ended_is_told(
    algorithm: str, form: str, ending: str, options: list[str], tmp_path: Path
):
    done = early(tmp_path, algorithm, form, ending, options)
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout + done.stderr
    # Without a wait for the results, a step that failed before its process ended is reported by no one.
    reports = 2 if ending == "awaited" else 1
    assert output.count(GONE) == output.count("waits for it") >= reports, output
    assert "nobody is told" not in output, output


@pytest.mark.parametrize(
    ("form", "ending"), parameters([("split", "awaited"), ("call", "watched")], [("call", "awaited")])
)
def test_what_mpi_does_not_take_back_ends_the_job(form: str, ending: str, tmp_path: Path):
    """Where MPI cannot revoke a communicator. The watchdog does not call a rank late that has ended."""
    done = early(tmp_path, "native", form, ending)
    assert done.returncode != 0
    assert f"{GONE}; MPI's own collectives cannot be broken off: the job ends" in done.stderr
    assert "in the middle of its program" not in done.stderr, "the sidecar names the rank that ended the job"


def test_a_rank_that_ends_the_job_in_a_packed_collective_is_not_named():
    outcome = mpi.judged(Fault("mpi", "exit", 1, 4, 100, " via native"))
    assert outcome.ended and outcome.right, outcome.text


LAST = """
import os, signal, sys, time
import jax, numpy as np
from mpi4py import MPI
from commplan.hang_limits import HangLimits
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec
how, rank = sys.argv[1], MPI.COMM_WORLD.rank
class Stopped:
    # Dropped by Python after its exit handlers.
    def __del__(self, stop=os.kill, process=os.getpid(), number=signal.SIGSTOP):
        stop(process, number)
bound_s = None if how == "none" and rank == 1 else 2.0
channel = Channel(MPI.COMM_WORLD, limits=HangLimits(bound_s), plan="p")
spec = Spec("all_reduce", algorithm=Algorithm("ring"), line=6, file="x.plan")
step = jax.jit(lambda x, token: channel.run(x, spec, token)[0])
step.lower(np.ones(1000, np.float32), channel.token()).compile()  # as long as it takes: then all begin
MPI.COMM_WORLD.Barrier()
for _ in range(6):
    step(np.ones(1000, np.float32), channel.token()).block_until_ready()
print("last", rank, flush=True)
if rank == 1 and how == "stop at exit":
    stopped = Stopped()
elif rank == 1:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(7)
    if how == "none":
        step(np.ones(1000, np.float32), channel.token()).block_until_ready()
elif how == "none":
    step(np.ones(1000, np.float32), channel.token()).block_until_ready()
print("done", rank, flush=True)
"""


def last(how: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = mpirun.command(3, LAST, how)
    return mpirun.started([command[0], *options, *command[1:]])


@pytest.mark.parametrize(("how", "options"), [("stop at exit", []), ("stop", ULFM)])
def test_who_stops_after_the_last_collective_holds_nobody(how: str, options: list[str]):
    done = last(how, *options)
    assert done.returncode != 0
    message = "rank 1 is stopped (SIGSTOP, or a debugger), and all others have ended: the job ends"
    assert f"commplan: error[CP0834]: {message}" in done.stderr, done.stdout + done.stderr


def test_a_rank_with_work_to_do_at_the_end_is_waited_for():
    assert mpirun.ended_well(last("work")).count("done") == 3


def test_nobody_is_watched_where_one_rank_waits_for_ever():
    """Ranks agree on how they are watched."""
    assert mpirun.ended_well(last("none")).count("done") == 3
