"""Waits end at their bound and look after others between slices; no endless wait is in the sources."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from commplan.wait import Wait, run_in_thread, until, until_done

ROOT = Path(__file__).parents[1]
# Calls that wait for other processes for an unbounded time, with any arguments.
ENDLESS = {
    "allgather",
    "bcast",
    "Barrier",
    "Dup",
    "Split",
    "Create_group",
    "Waitall",
    "Waitsome",
    "Wait",
    "Recv",
}
# Calls that do so without arguments.
BOUNDED = {"wait", "join", "result", "get", "acquire", "communicate", "recv", "accept"}
# What still waits, and why it may.
ALLOWED: dict[str, set[str]] = {
    # Threads of this process that compute, or write a file.
    "commplan/cli/verbs/run/view.py": {"join"},
    "runtime/calibrate/lock.py": {"Barrier", "join", "wait"},
    "runtime/observe/metrics.py": {"join"},
    "runtime/param_server/checkpoint.py": {"join"},
    # Called by a `Rendezvous`, which ends what is measured and what is watched.
    "runtime/calibrate/mpi.py": {"Barrier", "Waitall", "allgather", "bcast"},
    "lowering/mpi/job/watchdog.py": {"allgather"},
    # A method of this name that waits for nothing.
    "commplan/verify/programs/symbolic_execution.py": {"result"},
    "lowering/jax/variadic.py": {"get"},
    "lowering/jax/gradient_times.py": {"get"},
    "runtime/input/feeds/joining.py": {"join"},
    "runtime/input/multirate/clocked.py": {"join"},
    # A daemon thread waits for its next task until it is closed; a thread that has started registers itself.
    "runtime/input/stages/stage_threads.py": {"get"},
    "runtime/input/ring/producers.py": {"wait"},
    # Of a socket that does not block.
    "commplan/sidecar/__main__.py": {"accept"},
    # After a poll; and for its parent, with which it ends.
    "runtime/input/stages/worker_pool.py": {"recv"},
    "runtime/input/stages/worker_process.py": {"recv"},
}


class LateError(Exception):
    """Raised by a wait past its bound."""


def late(waited: float) -> NoReturn:
    raise LateError(f"{waited:.2f}")


def test_what_comes_in_time_is_returned() -> None:
    times: list[float] = []

    def attempt(seconds: float) -> str:
        times.append(seconds)
        return "here" if len(times) == 3 else ""

    assert until(attempt, Wait(60.0, late, slice_s=0.125)) == "here"
    assert times == [0.125] * 3


def test_past_the_bound_it_is_said_what_did_not_come() -> None:
    looks: list[float] = []
    with pytest.raises(LateError):
        until(time.sleep, Wait(0.05, late, looks.append, slice_s=0.01))
    assert len(looks) > 1
    assert looks == sorted(looks)


def test_a_look_ends_the_wait() -> None:
    def look(waited: float) -> None:
        raise ConnectionError(f"rank 1 has died after {waited} s")

    with pytest.raises(ConnectionError, match="rank 1 has died"):
        until(time.sleep, Wait(60.0, late, look, slice_s=0.001))


def test_looks_are_a_slice_apart_however_often_an_attempt_comes_back() -> None:
    attempts, looks = [0], list[float]()

    def attempt(seconds: float) -> bool:
        attempts[0] += 1
        time.sleep(0.001)
        return len(looks) == 2

    until_done(attempt, looks.append, slice_s=0.05)
    assert attempts[0] > len(looks) + 1
    assert all(later - earlier >= 0.05 for earlier, later in pairwise([0.0, *looks]))


def test_a_call_that_waits_by_itself_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(LateError):
        run_in_thread(lambda: never.wait(60), Wait(0.02, late, slice_s=0.01))
    never.set()
    assert run_in_thread(lambda: 7, Wait(60.0, late)) == 7
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0, Wait(60.0, late))


def test_a_wait_for_nothing_in_particular_is_found() -> None:
    source = "def f(queue, comm, words):\n    queue.get()\n    comm.allgather(1)\n    ', '.join(words)\n"
    source += "    message = comm.improbe()\n    message.recv()\n"
    assert list(endless(source)) == [(2, "get"), (3, "allgather")]


def test_no_wait_is_endless() -> None:
    waits = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for room in ("commplan", "dsl", "lowering", "runtime")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not any(part.is_symlink() for part in path.parents)
        for line, name in endless(path.read_text("utf-8"))
        if name not in ALLOWED.get(str(path.relative_to(ROOT)), ())
    ]
    assert not waits, "\n".join(["these wait without a bound: see commplan/wait.py", *waits])


def endless(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call that may wait for ever."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, has_arguments = node.func.attr, bool(node.args or node.keywords)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "message":
            continue  # matched already: it has come
        if name in ENDLESS or (name in BOUNDED and not has_arguments):
            yield node.lineno, name
