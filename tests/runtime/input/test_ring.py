"""The ring between processes that die, stop or join late: content, progress, and which process is named."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ring_process
from ring_process import SHAPE
from rings import UNITS, joined, path_of, stopped_in_lock
from support import interpreter
from support.campaign import parameters

from commplan.diagnostics import CommplanError, Span
from commplan.recorder.processes import process_state
from commplan.runtime.input.group import Blame, Group
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.claims import Blocker, Claim
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.peer_errors import PeerErrors
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.words import DONE, LEAVES, PARTS, UNIT

# pyright: reportPrivateUsage=false
DEADLY = ("claim", "lock", "open", "last part")


class Process:
    """A process of the ring."""

    def __init__(self, path: str, **orders: Any) -> None:
        words = [*interpreter.words(jax=False), ring_process.__file__]
        orders = {"path": path, "units": UNITS, **orders}
        self.process = subprocess.Popen(
            [*words, json.dumps(orders)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def read(self, key: str) -> Any:
        """The value of `key` in its next line that has one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            if key in answer:
                self.pid = answer.get("pid", 0) or self.pid
                return answer[key]
        assert self.process.stderr is not None
        raise AssertionError(self.process.stderr.read())

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture(name="processes")
def _processes() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        if process.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, signal.SIGKILL)
        process.process.communicate()


def started(processes: list[Process], memory: SharedMemory, orders: list[dict[str, Any]]) -> list[Process]:
    """Processes that have all joined, the first one before the others."""
    processes.append(Process(path_of(memory), **orders[0]))
    processes[0].read("joined")
    processes += [Process(path_of(memory), **each) for each in orders[1:]]
    for process in processes[1:]:
        process.read("joined")
    for process in processes:
        process.go()
    return processes


def test_all_units_reach_all_cursors_and_are_made_once(
    memory: SharedMemory, processes: list[Process]
) -> None:
    started(processes, memory, [{}] * 4)
    answers = [(process.read("taken"), process) for process in processes]
    assert [count for count, _ in answers] == [UNITS] * 4
    assert Ring(memory).least() is None
    assert sum(record.get("parts") for record in memory.processes) == UNITS * SHAPE.parts


@pytest.mark.parametrize("fault", DEADLY)
def test_a_part_whose_maker_dies_is_made_by_another(
    memory: SharedMemory, processes: list[Process], fault: str
) -> None:
    """The first process makes all units until it dies. If others made units, it could be too late to die."""
    memory.header.set(makers=1)
    started(processes, memory, [{"fault": fault, "at": 9}, {}, {}])
    dead, *survivors = processes
    assert [process.read("taken") for process in survivors] == [UNITS] * 2
    dead.process.wait(20)
    assert dead.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("fault", "kind"), [("stopped maker", "maker"), ("stopped idle", "cursor")])
def test_a_stopped_process_is_named_and_is_passed_over_without_a_claim(
    memory: SharedMemory, processes: list[Process], fault: str, kind: str
) -> None:
    """It is the one that makes units; without a claim only its cursor holds up the others."""
    memory.header.set(makers=1, cores=1)
    started(processes, memory, [{"fault": fault, "at": 9}, {}, {}])
    pid, ring, end = processes[0].read("stopped"), Ring(memory), time.monotonic() + 20
    while time.monotonic() < end:
        last_unit = max(record.get("wanted") for record in memory.cursors[1:3]) - 1
        if process_state(pid) == "stopped" and last_unit >= 0 and ring.blocker(last_unit).pid == pid:
            break
        time.sleep(0.002)
    assert ring.blocker(last_unit) == Blocker(kind, pid, 0 if kind == "cursor" else -1)  # pyright: ignore[reportArgumentType]
    os.kill(pid, signal.SIGCONT)
    assert [process.read("taken") for process in processes] == [UNITS] * 3


@pytest.mark.parametrize("seed", parameters([0], range(1, 60)))
def test_faults_of_all_kinds_at_once_and_a_process_that_joins_late(
    memory: SharedMemory, processes: list[Process], seed: int
) -> None:
    rng = random.Random(seed)
    faults = [*rng.sample(DEADLY, 3), rng.choice(("stopped maker", "stopped idle")), ""]
    rng.shuffle(faults)
    started(processes, memory, [{"fault": fault, "at": rng.randrange(1, UNITS // 4)} for fault in faults])
    is_over = threading.Event()
    resumer = threading.Thread(target=resume, args=(list(processes), is_over))
    resumer.start()
    try:
        deadline, begun = time.monotonic() + 20, rng.randrange(UNITS // 2)
        while memory.header.get("next") < begun and time.monotonic() < deadline:
            time.sleep(0.002)
        late = Process(path_of(memory))
        processes.append(late)
        late.read("joined")
        late.go()
        living = [process for process, fault in zip(processes, faults, strict=False) if fault not in DEADLY]
        assert [process.read("taken") for process in living] == [UNITS] * 2
        assert 0 <= late.read("taken") <= UNITS - begun
    finally:
        is_over.set()
        resumer.join()


def resume(processes: list[Process], is_over: threading.Event) -> None:
    """Continue stopped processes after a moment."""
    while not is_over.wait(0.1):
        for process in processes:
            if process_state(process.pid) == "stopped":
                time.sleep(0.2)
                os.kill(process.pid, signal.SIGCONT)


def test_a_part_that_nobody_makes_any_more_has_no_maker(group: list[Ring]) -> None:
    assert group[0].claim() == Claim(0, 0)
    for process in group[0].processes:
        process.set(state=LEAVES)
    assert group[0].awaited(0) == ([0, -1], []) and group[1].claim() is None


def test_a_group_waits_for_the_process_that_is_stopped_in_the_lock(
    group: list[Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of unit 0 are dealt to the places 0 and 1, which cannot claim them."""
    assert group[0].awaited(0) == ([0, 1], [])
    exchange = object.__new__(GroupExchange)
    exchange.ring, exchange._local, exchange._carriage = group[0], (0, 1, 2), None
    peers = Group("test-deal", 0, 3, 0.5, (0, 0, 0))
    exchange.group, exchange.errors = peers, PeerErrors(peers, Blame("", Span(1, 1, 1, 1), "tested.plan"))
    exchange.carrier = None
    monkeypatch.setattr(SharedMemory, "lives", lambda memory, place: True)
    with stopped_in_lock(group[0].memory) as pid:
        group[2].processes[2].set(pid=pid)
        assert group[0].awaited(0) == ([2], [])
        with pytest.raises(CommplanError, match="process 2 of 3 is stopped") as error:
            exchange.late(0, 0.5)
        assert error.value.diagnostics[0].code == "CP0921"


def test_claims_and_openings_of_a_unit(memory: SharedMemory) -> None:
    """The view of one process: parts in order, no more than `cores` at once, reused slots."""
    ring = joined(memory)
    assert ring.claim() is None  # no cursor has asked for an epoch
    ring.arm(0, UNITS)
    claims = [ring.claim(), ring.claim()]
    assert claims == [Claim(0, 0), Claim(0, 1)]
    assert ring.claim() is None  # both cores are busy
    for claim in claims:
        assert claim is not None and not ring.is_made(0)
        ring.done(claim, 1, spoiled=claim.part == 0)
    assert ring.is_made(0) and memory.slots[0].get("spoiled")
    with pytest.raises(AssertionError, match="part 0 of unit 0 was lost"):
        ring.done(Claim(0, 0), 1, spoiled=False)
    for unit in range(1, SHAPE.slots):
        for part in range(SHAPE.parts):
            assert ring.claim() == Claim(unit, part)
            ring.done(Claim(unit, part), 1, spoiled=False)
    assert ring.claim() is None and ring.blocker(SHAPE.slots) == Blocker("cursor", os.getpid(), 0)
    ring.release(0, 1)
    assert ring.claim() == Claim(SHAPE.slots, 0) and not ring.is_open(0)
    assert not memory.slots[0].get("spoiled") and not ring.is_kept(0) and ring.is_kept(1)
    assert ring.blocker(SHAPE.slots) == Blocker("maker", os.getpid())
    ring.leave()
    assert not ring.maker(SHAPE.slots)
    with pytest.raises(ClosedError):
        ring.blocker(SHAPE.slots)


def test_processes_that_see_a_new_unit_do_not_read_parts_of_the_previous_one(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors that reorder memory accesses, the words of parts are written before that of the unit."""
    ring = joined(memory)
    ring.arm(0, UNITS)
    ring.release(0, 1)
    words, fenced = memory.slots[1].words, list[tuple[int, ...]]()
    words[PARTS], words[PARTS + 1] = DONE + 1, DONE + 1
    monkeypatch.setattr("commplan.runtime.input.ring.ring.fence", lambda: fenced.append(tuple(words)))
    assert ring.claim() == Claim(1, 0)
    assert (0, 0, 0) in [(entry[UNIT], entry[PARTS], entry[PARTS + 1]) for entry in fenced]
    fenced.clear()
    assert not ring.is_whole(1) and len(fenced) == 1, "the reader also orders its accesses"


def test_cheap_parts_of_a_unit_are_claimed_together(memory: SharedMemory) -> None:
    ring = joined(memory)
    ring.claims_units = True
    ring.arm(0, UNITS)
    claims = [ring.claim() for _ in range(3)]
    assert claims == [Claim(0, 0, 2), Claim(1, 0, 2), None], "one claim for each core"
    assert ring.blocker(0) == Blocker("maker", os.getpid())
    following = ring.next_claim(Claim(0, 0, 2), 8, spoiled=False)
    assert ring.is_made(0) and ring.made_here(0) == [0, 1] and following == Claim(2, 0, 2)
    assert [ring.processes[0].get(name) for name in ("parts", "records")] == [2, 8]
    ring.leave()  # frees both parts of each claim
    assert [list(memory.slots[slot].words[PARTS : PARTS + 2]) for slot in (1, 2)] == [[0, 0]] * 2


def test_a_release_wakes_producers_only_if_they_need_the_slot(memory: SharedMemory) -> None:
    ring = joined(memory)
    ring.arm(0, UNITS)
    bell = memory.work_bell(ring.place)
    for unit in range(SHAPE.slots):
        ring.mark_idle(True)
        value = bell.value
        ring.release(0, unit)
        assert bell.value == value, "there are free slots"
        for part in range(SHAPE.parts):
            assert ring.claim() == Claim(unit, part)
            ring.done(Claim(unit, part), 1, spoiled=False)
    for part in range(2 * (SHAPE.slots - 1)):
        claim = ring.claim()
        assert claim is not None, part
        ring.done(claim, 1, spoiled=False)
    assert ring.claim() is None
    ring.mark_idle(True)
    value = bell.value
    ring.release(0, SHAPE.slots)
    assert bell.value == value + 1 and not ring.processes[ring.place].get("idle")


@pytest.fixture(name="group")
def _group() -> Iterator[list[Ring]]:
    """The rings of a group of three processes; this process is the first one."""
    shape = SHAPE._replace(processes=3, cursors=3)
    memory = meeting.created(
        "test-deal", "the group", shape, {}, kind="group", cores=2, most=2, makers=3, count=3, ends_with_one=1
    )
    rings = [Ring(memory) for _ in range(3)]
    assert memory.lock_place(0)
    memory.header.set(cursor_places=3)
    for place, ring in enumerate(rings):
        memory.cursors[place].set(process=place + 1, position=0, state=1)
        ring.enter(place, place + 1)
    rings[0].arm(0, UNITS)
    yield rings
    memory.close()


def test_parts_of_a_group_are_dealt_in_turn(group: list[Ring], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemory, "lives", lambda memory, place: True)
    for number in range(SHAPE.slots * SHAPE.parts):
        place = number % 3
        claim = group[place].claim()
        assert claim is not None and claim == Claim(*divmod(number, SHAPE.parts))
        group[place].done(claim, 1, spoiled=False)
    assert [ring.claim() for ring in group] == [None] * 3, "the cursors have taken nothing"
    assert group[1].made_here(2) == [0] and group[1].awaited(SHAPE.slots) == ([], [0, 1, 2])
    for cursor in range(3):
        group[0].release(cursor, 1)
    assert group[0].claim() == Claim(SHAPE.slots, 1) and group[0].awaited(SHAPE.slots) == ([2, 0], [])
    group[0].done(Claim(SHAPE.slots, 1), 1, spoiled=False)
    assert group[0].awaited(SHAPE.slots) == ([2], []) and group[0].claim() is None
    assert group[0].excuse(SHAPE.slots), "the others do not respond"
    assert group[0].claim() == Claim(SHAPE.slots, 0)


def test_a_process_leaves_earlier_parts_to_the_makers_that_can_claim_them(group: list[Ring]) -> None:
    """Otherwise the first unit of an epoch would wait for cores that make later units."""
    group[0].header.set(cores=2)
    assert group[2].claim() is None, "both parts of unit 0 are due"
    assert group[0].claim() == Claim(0, 0) and group[2].claim() is None
    assert group[1].claim() == Claim(0, 1) and group[2].claim() is None, "two parts are in progress"
    group[1].done(Claim(0, 1), 1, spoiled=False)
    assert group[1].claim() is None and group[2].claim() == Claim(1, 0)
    group[2].done(Claim(1, 0), 1, spoiled=False)
    assert group[1].claim() == Claim(2, 0), "place 0, whose turn is before, is busy"


def test_a_reader_that_begins_late_is_the_reader_again(
    group: list[Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only reader has not asked for a batch yet, as if it compiled its step."""
    monkeypatch.setattr(SharedMemory, "lives", lambda memory, place: True)
    group[0].header.set(makers=1)
    group[2].arm(2, UNITS)
    assert group[2].eligible() == [0] and group[2].excuse(0) and group[2].eligible() == [1]
    group[0].arm(0, 2 * UNITS)
    assert group[2].eligible() == [0] and group[0].threads() == 2 and group[1].threads() == 0


def test_more_parts_are_in_the_making_if_making_waits(group: list[Ring]) -> None:
    group[0].header.set(most=12)
    assert group[0].most_making() == 2
    group[0].measure(1000, 300, is_first=True)
    assert group[0].most_making() == 2
    group[0].measure(1000, 3700, is_first=False)
    assert group[0].most_making() == 6 and group[0].threads() == 2
    group[0].measure(10, 1000, is_first=True)
    assert group[0].most_making() == 12


def test_cursors_of_processes_that_died_stay(group: list[Ring]) -> None:
    """A group that ends with one of its processes: the places of others are not locked, so they are dead."""
    assert group[0].reap()
    assert [record.get("state") for record in group[0].processes] == [1, 4, 4]
    assert [record.get("state") for record in group[0].cursors] == [1, 1, 1]
    assert group[0].eligible() == [0] and not group[0].reap()
