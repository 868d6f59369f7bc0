"""Batches between real processes of one host: the same bits, divided work, and no hang after deaths."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from input_plans import FUNCTIONS, ensemble, images
from support.asleep import until_asleep
from support.sharing import SHARED, Processes

from commplan.diagnostics import CommplanError
from commplan.runtime.input.group import group
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.observe import wait_log
from commplan.runtime.input.ring import forming, meeting
from commplan.runtime.input.shm import locks

SLOW_S = 0.05  # between the steps of those that are ended: an epoch takes half a minute


class Team(Processes):
    """Processes of one run; all have ended when the test ends, however it ends."""

    def __init__(self) -> None:
        super().__init__("input_process.py")

    def start(self, index: int, count: int, **orders: Any) -> subprocess.Popen[str]:
        return self.one({"design": "all_shared", **orders, "index": index, "count": count})

    def all(self, count: int, **orders: Any) -> list[subprocess.Popen[str]]:
        return [self.start(index, count, **orders) for index in range(count)]


@pytest.fixture
def team() -> Iterator[Team]:
    with Team() as processes:
        yield processes
        for process in processes.processes:
            process.wait(timeout=60)


def told(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The output of a process, after it has ended."""
    out, err = process.communicate(timeout=120)
    assert err == "", err
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def steps(reports: list[dict[str, Any]]) -> list[Any]:
    return [(x["epoch"], x["step"], x["sums"], x["count"]) for x in reports if "sums" in x]


def errors(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [x for x in reports if "code" in x]


def last(reports: list[dict[str, Any]], key: str) -> Any:
    return next(x[key] for x in reversed(reports) if key in x)


DESIGNS = ["all_shared", "single_broadcast(readers = 1)", "multi_broadcast(readers = 2)"]


@pytest.mark.parametrize(("count", "design"), list(zip((2, 3, 3), DESIGNS, strict=True)))
def test_shared_and_duplicated_batches_are_the_same_bits(team: Team, count: int, design: str) -> None:
    shared = [told(p) for p in team.all(count, epochs=2, design=design)]
    alone = [told(p) for p in team.all(count, epochs=2, design="duplicate", run="")]
    for shared_step, own_step in zip(shared, alone, strict=True):
        assert errors(shared_step) == errors(own_step) == []
        assert steps(shared_step) == steps(own_step) and len(steps(shared_step)) == 10
        assert last(shared_step, "threads") == []
        assert last(own_step, "read") == sorted([*range(40)] * 2)
    assert sorted(r for reports in shared for r in last(reports, "read")) == sorted([*range(40)] * 2)
    assert len({str(steps(reports)) for reports in shared}) == count, "each member has its own augmentation"
    readers = count if design == "all_shared" else int(design[-2])
    assert [len(last(reports, "read")) > 0 for reports in shared] == [i < readers for i in range(count)]


def test_the_accounts_tell_what_was_made_and_what_was_received(team: Team) -> None:
    for reports in [told(p) for p in team.all(2)]:
        lines = last(reports, "lines")
        assert lines["load images"][0] == lines["map decode"][0] == 20
        assert lines["share pixels via all_shared"] == [20, 20 * 36]
        assert lines["map flip"][0] == 40


def test_more_members_than_processes_and_the_sharing_pass(team: Team) -> None:
    """Four members in two processes, and nothing pinned: the pass decides to share pixels and labels."""
    body = """raw, n = load images batch 8 visit exactly_once seed 17
        pixels, labels = map decode(raw)
        batch = map flip(pixels) per member
        output batch, labels, n"""
    orders = {"body": body, "axes": "ensemble member = 4", "records": 20}
    both = [{"member": [0, 1]}, {"member": [2, 3]}]
    processes = [team.start(i, 2, local=both[i], pipeline="share", **orders) for i in range(2)]
    shared = [told(p) for p in processes]
    alone = [told(team.start(i, 2, local=both[i], run="", **orders)) for i in range(2)]
    for shared_step, own_step in zip(shared, alone, strict=True):
        assert [x[3] for x in steps(shared_step)] == [x[3] for x in steps(own_step)] == [[8], [8], [4]]
        assert [sorted(x[2].values()) for x in steps(shared_step)] == [
            sorted(x[2].values()) for x in steps(own_step)
        ]
    assert sum(len(last(reports, "read")) for reports in shared) == 24


def test_skipped_records_are_skipped_by_all(team: Team) -> None:
    orders = {"bad": [3, 11, 12], "hints": "{ on_error = skip }"}
    shared = [told(p) for p in team.all(3, **orders)]
    alone = [told(p) for p in team.all(3, run="", **orders)]
    for shared_step, own_step in zip(shared, alone, strict=True):
        assert steps(shared_step) == steps(own_step)
        assert sum(x[3][0] for x in steps(shared_step)) == 37


def test_a_restored_group_goes_on(team: Team) -> None:
    whole = steps(told(team.start(0, 1, epochs=2, design="duplicate", run="", members=2)))
    first = [told(p) for p in team.all(2, stop_after=1)]
    states = [last(reports, "state") for reports in first]
    assert states[0] == states[1]
    team.run += "b"
    continued = told(team.all(2, state=states[0], epochs=1)[0])
    assert steps(continued) == whole[2:5]


def test_the_error_of_one_is_the_error_of_all_at_the_same_batch(team: Team) -> None:
    processes = [told(p) for p in team.all(3, bad=[7])]
    problems = [errors(reports)[0] for reports in processes]
    assert {p["code"] for p in problems} == {"CP0906"}
    assert {p["message"] for p in problems} == {
        "host function `decode` on record 7 raised ValueError: truncated"
    }
    assert len({len(steps(reports)) for reports in processes}) == 1
    assert sum(any("raised in process" in note for note in p["notes"]) for p in problems) == 2


def test_when_one_is_killed_the_others_say_so(team: Team) -> None:
    processes = team.all(3, records=4000, pause=SLOW_S)
    victim = processes[1]
    assert victim.stdout is not None
    pid = json.loads(victim.stdout.readline())["joined"]
    victim.stdout.readline()
    os.kill(pid, signal.SIGKILL)
    victim.wait(60)
    for process in (processes[0], processes[2]):
        reports = told(process)
        problem = errors(reports)[0]
        assert problem["code"] == "CP0920"
        assert (
            "process 1 of 3 died" in problem["message"] and f"line {problem['line']} " in problem["message"]
        )
        assert last(reports, "threads") == []


def test_when_one_leaves_early_the_others_say_so(team: Team) -> None:
    processes = [team.start(0, 2, records=400, stop_after=2), team.start(1, 2, records=400)]
    assert last(told(processes[0]), "closed")
    problem = errors(told(processes[1]))[0]
    assert problem["code"] == "CP0920" and "process 0 of 2 left" in problem["message"]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_who_waits_for_one_that_gave_up_blames_whom_that_one_blames(team: Team, how: signal.Signals) -> None:
    """Process 2 waits for a value that only process 0 makes, which process 1 blocks by taking nothing."""
    orders = {"records": 4000, "pause": SLOW_S, "timeout": 120.0, "design": DESIGNS[1]}
    first, lost, last_one = (
        team.start(i, 3, **orders, then_timeout=2.0 if i == 0 else 120.0) for i in range(3)
    )
    assert lost.stdout is not None
    pid = json.loads(lost.stdout.readline())["joined"]
    os.kill(pid, how)
    state = "is stopped, and was silent" if how == signal.SIGSTOP else "died"
    try:
        for process in (first, last_one):
            assert f"process 1 of 3 {state}" in errors(told(process))[0]["message"]
    finally:
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    if how == signal.SIGSTOP:
        message = errors(told(lost))[0]["message"]
        assert "process 0 of 3 left: it had waited for this one in vain" in message


def test_a_silent_peer_is_named_soon_and_in_the_end(team: Team) -> None:
    slow = {"records": 4000, "pause": SLOW_S, "timeout": 120.0}
    processes = [team.start(0, 2, **slow), team.start(1, 2, **slow, then_timeout=2.0, usual_s=0.5)]
    sleeper = processes[0]
    assert sleeper.stdout is not None
    pid = json.loads(sleeper.stdout.readline())["joined"]
    os.kill(pid, signal.SIGSTOP)
    try:
        reports = told(processes[1])
        problem = errors(reports)[0]
        assert (
            problem["code"] == "CP0921" and "process 0 of 2 is stopped, and was silent" in problem["message"]
        )
        first = next(entry["warned"] for entry in reports if "warned" in entry)
        waits = r"process 1 has waited \d s for process 0 of 2 for its part of batch \d+"
        state = rf"line {problem['line']} waits; process 0 \(PID {pid}\) is stopped"
        assert re.fullmatch(f"{waits}; {state}: kill -CONT {pid} lets it continue", first)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert errors(told(sleeper))[0]["code"] == "CP0920"


def test_a_peer_that_never_comes_is_named(team: Team) -> None:
    for index in range(2):
        problem = errors(told(team.start(index, 2, timeout=0.5)))[0]
        assert problem["code"] == "CP0921"
        assert f"process {1 - index} of 2 did not come" in problem["message"]


def test_peers_that_do_not_do_the_same_are_told(team: Team) -> None:
    """One of them is at another position: it was restored, the other was not. Both report this at once."""
    alone = told(team.start(0, 1, run="", design="all_shared", members=2, stop_after=1))
    processes = [team.start(0, 2, timeout=600.0), team.start(1, 2, state=last(alone, "state"), timeout=600.0)]
    for problem in [errors(told(process))[0] for process in processes]:
        assert problem["code"] == "CP0922" and "what differs: the place in the order" in problem["notes"]


def test_peers_with_other_plans_are_told(team: Team) -> None:
    processes = [team.start(i, 2, timeout=600.0, hints=f"{{ prefetch = {2 + i} }}") for i in range(2)]
    for problem in [errors(told(process))[0] for process in processes]:
        assert problem["code"] == "CP0922" and "what differs: the plan" in problem["notes"]


def test_who_is_waited_for_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(wait_log, "START_S", 0.02)
    for index in range(2):
        among = group(f"late-{os.getpid()}", index, 2, timeout=1.0)
        program = ensemble("all_shared", 2)
        with pytest.raises(CommplanError), caplog.at_level(logging.WARNING, "commplan.input"):
            local = {"member": (index,)}
            PhaseBatches(program, "step", {"images": images(8)}, FUNCTIONS, local=local, group=among)
        assert f"process {1 - index} of 2 to join" in caplog.text


def test_a_late_comer_is_waited_for(team: Team) -> None:
    processes = [team.start(0, 2, late=1.0), team.start(1, 2)]
    outputs = [told(p) for p in processes]
    assert [len(steps(reports)) for reports in outputs] == [5, 5]


def test_an_interrupt_ends_a_waiting_process(team: Team) -> None:
    processes = [team.start(0, 2, records=4000, pause=10 * SLOW_S), team.start(1, 2, records=4000)]
    assert processes[1].stdout is not None
    pid = json.loads(processes[1].stdout.readline())["joined"]
    until_asleep(pid)
    os.kill(pid, signal.SIGINT)
    out, err = processes[1].communicate(timeout=60)
    assert processes[1].returncode != 0 and "KeyboardInterrupt" in err
    assert "resource_tracker" not in err and "Fatal" not in err, out
    assert errors(told(processes[0]))[0]["code"] == "CP0920"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc is Linux's")
def test_opening_and_closing_leaves_nothing_open(team: Team) -> None:
    """The same run id repeatedly: each time the processes meet anew, and release all resources."""
    for reports in [told(p) for p in team.all(2, cycles=12)]:
        assert last(reports, "first") == last(reports, "last")
        assert last(reports, "first")[0] == 5 and last(reports, "first")[2:] == [0, 1]


# --- the memory itself ---


def member(index: int, run: str, timeout: float = 30.0) -> PhaseBatches:
    """The batches of a process of a group of two, in this process."""
    return PhaseBatches(
        ensemble("all_shared", 2), "step", {"images": images(8)}, FUNCTIONS, local={"member": (index,)},
        group=group(run, index, 2, timeout=timeout),
    )  # fmt: skip


def test_a_second_process_of_a_number_is_refused(team: Team) -> None:
    """In this process, whose own locks the kernel does not report, and in another one."""
    late: list[str] = []

    def first() -> None:
        with pytest.raises(CommplanError, match=r"CP0921.*process 1 of 2 did not come") as error:
            member(0, team.run, 3.0)
        late.append(str(error.value))

    thread = threading.Thread(target=first)
    thread.start()
    while not list(meeting.memory_files(f"{team.run}-step-0", forming.KIND)):
        time.sleep(0.01)
    with pytest.raises(CommplanError, match=r"CP0921.*another process 0 of this run is there"):
        member(0, team.run)
    problem = errors(told(team.start(0, 2, records=8)))[0]
    assert problem["code"] == "CP0921" and "another process 0 of this run" in problem["message"]
    thread.join()
    assert late and not list(meeting.memory_files(f"{team.run}-step-0", forming.KIND))


@pytest.mark.parametrize("available", [True, False])
def test_memory_that_is_not_there_is_an_error_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    if available:  # as far as the kernel tells
        monkeypatch.setattr(os, "posix_fallocate", none_left)
    else:
        monkeypatch.setattr(meeting, "_available", lambda: 0.0)
    with pytest.raises(CommplanError, match=r"CP0923.*there is not enough of it"):
        member(0, f"huge-{os.getpid()}")
    assert not list(meeting.memory_files(f"huge-{os.getpid()}-step-0", forming.KIND))


def none_left(*_: object) -> None:
    raise OSError(errno.ENOMEM, "there is not enough of it")


def test_a_group_waits_for_some_time() -> None:
    with pytest.raises(CommplanError) as error:
        group("x", 0, 2, timeout=0.0)
    assert error.value.diagnostics[0].code == "CP0924"
    with pytest.raises(CommplanError, match="CP0924"):
        group("x", 0, 2, timeout="5")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("run", "index", "count"), [("a/b", 0, 2), ("", 0, 2), ("x", 2, 2), ("x", -1, 2), (5, 0, 2)]
)
def test_groups_that_cannot_be(run: Any, index: int, count: int) -> None:
    with pytest.raises(CommplanError) as error:
        group(run, index, count)
    assert error.value.diagnostics[0].code == "CP0924"


def test_the_default_folder_is_memory_where_there_is_one() -> None:
    assert locks.default_folder() == SHARED if SHARED.is_dir() else locks.default_folder().is_dir()
