"""Members with independent clocks in separate processes: one stream in shared memory, any pace, any end."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multirate_plans import ONCE, alone, rates
from support import interpreter

HERE = Path(__file__).parent
SCRIPT = str(HERE / "multirate_process.py")
SHARED = Path("/dev/shm")
OURS = f"clocks{os.getpid()}"  # runs of other tests exist at the same time


@contextmanager
def started(
    run: str, members_of: Sequence[Sequence[int]], /, **orders: Any
) -> Generator[list[subprocess.Popen[str]]]:
    """A process for each list of members."""
    common = {"run": f"{OURS}-{run}", "held": members_of, "rest": f"{ONCE} tail short", **orders}
    processes = [
        subprocess.Popen(
            [*interpreter.words(jax=False), SCRIPT, json.dumps({**common, "index": i})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(len(members_of))
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str], *, fails: bool = False) -> list[dict[str, Any]]:
    """All that a process says to its end."""
    out, err = process.communicate(timeout=120)
    assert fails or process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def until(process: subprocess.Popen[str], key: str) -> dict[str, Any]:
    """The next line that has `key`."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        report = json.loads(line)
        if key in report:
            return report
    raise AssertionError(f"the process ended without {key}")


def expected(
    batches: Sequence[int], member: int, records: int, epochs: int = 1, visit: str = f"{ONCE} tail short"
):
    """The expected output of `multirate_process` for a single member."""
    program = rates(batches, f"{ONCE} tail short")
    with alone(program, member, records) as feed:
        for _ in range(epochs):
            for batch in feed:
                yield {
                    "member": member,
                    "epoch": batch.epoch,
                    "step": batch.step,
                    "sums": [zlib.crc32(np.ascontiguousarray(a)) for _, a in sorted(batch.values.items())],
                    "ids": [ids.ravel().tolist() for ids in batch.records.values()],
                }


def batches_of(lines: Sequence[dict[str, Any]], member: int) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("member") == member and "step" in line]


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory():
    yield
    assert list(SHARED.glob(f"commplan-*-{OURS}-*")) == []


@pytest.mark.parametrize("members_of", [[[0], [1], [2]], [[0, 2], [1]]])
def test_each_gets_its_own_and_each_record_is_made_once_between_all(members_of: list[list[int]]) -> None:
    sizes = [4, 4, 8]
    pace = {"members": {"0": {"epochs": 2}, "1": {"epochs": 2, "pace": 0.003}, "2": {"epochs": 2}}}
    with started(f"own-{len(members_of)}", members_of, batches=sizes, records=101, **pace) as processes:
        lines = [said(process) for process in processes]
    for index, members in enumerate(members_of):
        for member in members:
            assert batches_of(lines[index], member) == list(expected(sizes, member, 101, 2))
    ends = [end[-1] for end in lines]
    assert sorted(record for end in ends for record in end["read"]) == sorted([*range(101)] * 2)
    assert all(end["read"] for end in ends)
    assert all(end["left"] == [] for end in ends)


def test_a_slow_process_holds_the_others_and_is_named() -> None:
    orders = {"members": {"1": {"stay": 0}}, "tell": 0.1}
    with started("slow", [[0], [1]], batches=[4, 8], records=200, **orders) as processes:
        until(processes[1], "stays")
        warning = until(processes[0], "warned")
        assert "for member 1 (process" in warning["warned"] and "records behind" in warning["warned"]
        print("", file=processes[1].stdin, flush=True)
        lines = [said(process) for process in processes]
    assert lines[0][-1]["slow"] == [1, True]
    assert batches_of(lines[1], 1) == list(expected([4, 8], 1, 200))[1:]


@pytest.mark.parametrize("how", ["close", "finish"])
def test_who_leaves_or_has_finished_holds_nobody(how: str) -> None:
    """Member 1 closes its batches early, or is idle after its only epoch; member 0 goes on for three."""
    mine = {"close": 2} if how == "close" else {"linger": True}
    orders = {"members": {"0": {"epochs": 3}, "1": mine}}
    with started(how, [[0], [1]], batches=[4, 8], records=101, **orders) as processes:
        lines = said(processes[0])
        assert batches_of(lines, 0) == list(expected([4, 8], 0, 101, 3))
        other = said(processes[1])
    full = list(expected([4, 8], 1, 101))
    assert batches_of(other, 1) == (full[:3] if how == "close" else full)
    counts = Counter(lines[-1]["read"] + other[-1]["read"])
    assert set(counts) == set(range(101)) and max(counts.values()) <= 4


def test_batches_may_be_kept_and_never_change() -> None:
    orders = {"members": {"0": {"keep": True, "epochs": 2}, "1": {"keep": True, "epochs": 2}}}
    with started("kept", [[0], [1]], batches=[4, 8], records=301, **orders) as processes:
        lines = [said(process) for process in processes]
    for member in (0, 1):
        assert batches_of(lines[member], member) == list(expected([4, 8], member, 301, 2))
        assert next(line["changed"] for line in lines[member] if "done" in line) == 0


def test_who_is_killed_is_done_without() -> None:
    orders = {"members": {"0": {"epochs": 2}, "1": {"die": 2}, "2": {"epochs": 2}}}
    with started("killed", [[0], [1], [2]], batches=[4, 4, 8], records=101, **orders) as processes:
        lines = [said(process, fails=index == 1) for index, process in enumerate(processes)]
    assert processes[1].returncode == -9
    for member in (0, 2):
        assert batches_of(lines[member], member) == list(expected([4, 4, 8], member, 101, 2))


def test_places_are_restored_under_another_layout() -> None:
    sizes = [4, 4, 8]
    orders = {"members": {"0": {"close": 11}, "1": {"close": 11}, "2": {"close": 4}}}
    with started("first", [[0], [1], [2]], batches=sizes, records=101, **orders) as processes:
        for process in processes:
            said(process)
    order = [next(iter(_order(sizes, m, 101))) for m in range(3)]
    states = {str(m): {"epoch": 0, "step": step, "order": order[m]} for m, step in enumerate((12, 12, 5))}
    with started("second", [[2], [0, 1]], batches=sizes, records=101, states=states, start=10) as processes:
        lines = [said(process) for process in processes]
    for index, member, step in ((1, 0, 12), (1, 1, 12), (0, 2, 5)):
        assert batches_of(lines[index], member) == list(expected(sizes, member, 101))[step:]
    read = Counter(record for end in lines for record in end[-1]["read"])
    assert sum(read.values()) == 101 - 10 * 4


def _order(sizes: Sequence[int], member: int, records: int) -> Iterator[int]:
    with alone(rates(sizes, f"{ONCE} tail short"), member, records) as feed:
        yield feed.state()["order"]
