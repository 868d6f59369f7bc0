"""The fault campaign: the drawn cases, and the words of a job that count as correct."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from support.campaign import parameters

import commplan
from bench.faults import __main__ as campaign
from bench.faults import cluster, input, jax, mpi, process, servers
from bench.faults.campaign import Fault, Outcome, fault_of, in_time, resumed, table
from commplan.diagnostics import CommplanError
from commplan.hang_limits import UNWATCHED
from commplan.runtime.machines.machine import BindReport, BindRequest, agree


def test_all_places_are_drawn_in_proportion_to_their_kinds():
    names = list(campaign.PLACES)
    drawn = campaign.faults(names, 300, 1)
    assert drawn == campaign.faults(names, 300, 1) != campaign.faults(names, 300, 2)
    assert all(fault_of(fault.words) == fault for fault in drawn) and len({*drawn}) == 300
    kinds = Counter((fault.place, fault.kind) for fault in drawn)
    assert kinds.keys() == {(name, kind) for name, p in campaign.PLACES.items() for kind in p.kinds}
    assert max(kinds.values()) - min(kinds.values()) <= 1


def test_outcomes_are_resumed_and_counted(tmp_path: Path):
    first = Fault("input", "kill", 1, 4, 4, "all_shared")
    other = first._replace(kind="stop")
    faults: list[Fault] = []

    def judge(fault: Fault) -> Outcome:
        faults.append(fault)
        return Outcome(fault, None if fault.kind == "stop" else 0.3, fault.kind != "stop", True, "words")

    file = tmp_path / "outcomes"
    outcomes = [resumed(file, judge, fault) for fault in (first, other, first)]
    assert faults == [first, other] and outcomes[0] == outcomes[2]
    assert [json.loads(line)[0][1] for line in file.read_text().splitlines()] == ["kill", "stop"]
    head, *lines = table(outcomes, {"input": 3.0})
    assert head.split()[:4] == ["place", "fault", "jobs", "ended"]
    assert [line.split() for line in lines] == [
        ["input", "kill", "2", "2", "2", "2", "0.3", "0.3"],
        ["input", "stop", "1", "0", "1", "0", "-", "-"],
    ]


STOPPED = (
    "error[CP0834]: rank {rank} is stopped (SIGSTOP, or a debugger)\nnote: line {line} of {plan} waits for it"
)


@pytest.mark.parametrize("place", [mpi, jax, servers])
def test_the_message_of_programs_that_differ_is_expected(place: ModuleType):
    def exchange(report: BindReport) -> dict[int, BindReport]:
        flags = ("", mpi.FLAG, "")
        return {n: BindReport({**report.alike, "XLA_FLAGS": text}) for n, text in enumerate(flags)}

    plan = mpi.plan_of(Fault("mpi", "flag", 1, 0, 8, ""), culprit=False)
    program = commplan.loads(plan).compile({"data": 3}, backend="mpi")
    request = BindRequest(program.schedule, program.digest, 0, lambda: None, UNWATCHED, 1.0)
    with pytest.raises(CommplanError) as caught:
        agree("process" if place is jax else "rank", request, exchange)
    for culprit in range(3):
        fault = Fault(place.__name__, "flag", culprit, 0, 8, "")
        assert place.right(fault, str(caught.value)) is (culprit == 1)


@pytest.mark.parametrize(("rank", "line", "right"), [(1, 7, True), (2, 7, False), (1, 11, False)])
def test_an_innocent_rank_or_another_line_is_wrong(rank: int, line: int, right: bool):
    fault = Fault("mpi", "stop", 1, 5, 100, "")
    text = STOPPED.format(rank=rank, line=line, plan="<plan>")
    assert mpi.right(fault, text) is right
    assert not mpi.right(fault._replace(kind="exit"), text), "who ends by itself says so"
    assert not mpi.right(fault, text + "\nnote: rank 0 has died")
    assert cluster.right(fault, text) is right


SIDECAR = "error[CP0834]: {who} {number} (process 4711 on node) exited with status 1 in line 7 of <plan>\n"


@pytest.mark.parametrize("number", [1, 2])
def test_a_second_message_that_names_an_innocent_rank_is_wrong(number: int):
    """The sidecar prints it when no process of the job is left."""
    text = "error[CP0834]: the program has ended on {who} 1; line 7 of <plan> waits for it\n"
    note = "  note: {who} 0 (process 4709 on node) was ended (SIGTERM) in line 7 of <plan>\n"
    for place, who in ((mpi, "rank"), (jax, "process")):
        fault = Fault(place.__name__, "exit", 1, 5, 100, "")
        assert place.right(fault, text.format(who=who))
        assert place.right(fault, (text + SIDECAR + note).format(who=who, number=number)) is (number == 1)
    raised = "ArithmeticError: loss is not finite\nMPI_ABORT was invoked on rank 1 in communicator\n"
    fault = Fault("mpi", "raise", 1, 5, 100, "")
    assert mpi.right(fault, raised + SIDECAR.format(who="rank", number=number)) is (number == 1)


@pytest.mark.parametrize(("place", "who"), [(mpi, "rank"), (jax, "process")])
def test_of_another_shape_the_argument_of_the_culprit_is_named(place: ModuleType, who: str):
    fault = Fault(place.__name__, "shape", 1, 5, 100, mpi.RING)
    text = "error[CP0854]: {who} {number} calls `train` with argument [2]: f16[1], {who} 0 with f32[1]\n"
    right = [place.right(fault, text.format(who=who, number=number)) for number in range(3)]
    assert right == [False, True, False]
    assert not place.right(fault, text.format(who=who, number=1) + SIDECAR.format(who=who, number=2))
    assert not place.right(fault, "")


@pytest.mark.parametrize(("kind", "lines"), [("skip", "7 11 7"), ("order", "7 11 7")])
def test_of_another_order_each_rank_stands_in_its_own_line(kind: str, lines: str):
    fault = Fault("mpi", kind, 1, 5, 100, mpi.RING)
    waits = [f"note: rank {rank} waits in line {line} of <plan>" for rank, line in enumerate(lines.split())]
    assert mpi.right(fault, "\n".join(waits))
    assert not mpi.right(fault._replace(culprit=2), "\n".join(waits))
    assert not mpi.right(fault, "\n".join([*waits, "rank 0 has died"]))
    assert not mpi.right(fault, "\n".join(waits[:2]))


def test_of_an_exception_the_rank_that_ended_the_job_is_looked_at():
    fault = Fault("mpi", "raise", 1, 5, 100, "")
    text = "ArithmeticError: loss is not finite\nMPI_ABORT was invoked on rank {} in communicator"
    assert mpi.right(fault, text.format(1))
    assert not mpi.right(fault, text.format(2))
    assert not mpi.right(fault, text.format(1) + "\nrank 0 has died")


def test_a_first_word_past_the_bound_is_late():
    outcome = Outcome(Fault("mpi", "stop", 1, 5, 100, ""), 6.9, ended=True, right=True, text="")
    assert in_time(outcome, 2.0) and not in_time(outcome._replace(seconds=7.1), 2.0)
    assert in_time(outcome._replace(seconds=None), 2.0)
    assert not in_time(outcome._replace(seconds=None, right=False), 2.0)


def test_a_slow_link_must_name_nobody():
    fault = Fault("cluster", "slow", 1, 5, 100, "")
    text = "".join(f"rank {rank} has made all steps\n" for rank in range(3))
    assert cluster.right(fault, text)
    assert not cluster.right(fault, text + STOPPED.format(rank=1, line=7, plan="<plan>"))
    assert not cluster.right(fault, text[:30])


def test_a_server_is_not_blamed_for_a_worker():
    fault = Fault("servers", "stop", 0, 5, 100, "sync")
    text = STOPPED.format(rank=0, line=13, plan="served.plan")
    assert servers.right(fault, text)
    assert not servers.right(fault, text + "\nserver `hub` (rank 2) has died")
    assert not servers.right(fault._replace(culprit=1), text)
    lost = "worker 0 is done\nserved, lost (1,)\n"
    killed = Fault("servers", "kill", 1, 5, 100, "async")
    for number in (0, 1):  # the sidecar reports how the worker died once all have ended
        assert servers.right(killed, lost + SIDECAR.format(who="rank", number=number)) is (number == 1)


def test_plans_have_the_lines_that_are_looked_for():
    """The verdicts depend on these line numbers."""
    lines = mpi.PLAN.splitlines()
    assert [lines[line - 1].split()[0] for line in mpi.LINES.values()] == ["grads", "loss"]
    for via, plan in (("sync", servers.SYNC), ("async", servers.ASYNC)):
        assert re.search("exchange|elastic", plan.splitlines()[servers.LINE[via] - 1])
    shared = input.PLAN.splitlines()
    assert "map decode" in shared[input.MAPS - 1] and "share" in shared[input.SHARES - 1]
    assert "map decode" in process.PLAN.splitlines()[process.LINE - 1]


@pytest.mark.parametrize("kind", parameters(["kill"], ["sleep"]))
def test_a_member_of_shared_input_is_named(kind: str):
    fault = input.draw(random.Random(4), kind)
    outcome = input.judged(fault)
    assert outcome.ended and outcome.right, outcome.text


def test_a_worker_that_is_stopped_is_named():
    outcome = process.judged(process.draw(random.Random(1), "stop"))
    assert outcome.ended and outcome.right, outcome.text
