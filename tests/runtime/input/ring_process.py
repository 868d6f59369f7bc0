"""A process of a ring whose units are numbers, which dies or stops at a given point.

python ring_process.py '{"path": "/proc/1/fd/3", "units": 60, "fault": "claim", "at": 7}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, cast

from commplan import io
from commplan.runtime.input.ring import cursor as cursors
from commplan.runtime.input.ring.claims import Claim
from commplan.runtime.input.ring.cursor import Cursor
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.producers import Producers, Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import Made, Units
from commplan.runtime.input.ring.words import DONE, Shape

SHAPE = Shape(slots=4, slot_nbytes=4096, parts=2, processes=8, cursors=8)
CELL = 64  # bytes of a part


class Numbers:
    """Units whose parts are their numbers."""

    def fill(self, unit: int, parts: range, root: Any, is_stopped: Callable[[], bool]) -> Made:
        for part in parts:
            memoryview(root).cast("B")[part * CELL : part * CELL + 8] = content(unit, part)
        return Made(len(parts), False)

    def note(self, unit: int, part: int, root: Any, error: BaseException | None) -> None:
        del unit, part, root
        assert error is None, error

    def release_thread(self) -> None:
        pass


class Patient:
    """Waits for 20 s."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.timeout = ring, 20.0

    def is_open(self) -> bool:
        return True

    def blocked(self, unit: int) -> None:
        del unit

    def look(self, unit: int, waited: float) -> None:
        del unit, waited

    def late(self, unit: int, waited: float) -> NoReturn:
        raise TimeoutError(f"unit {unit}: {self.ring.blocker(unit)} after {waited} s")


class Faulty(Ring):
    """A ring in this process, which dies or stops at claim number `at`."""

    def __init__(self, memory: SharedMemory, fault: str, at: int) -> None:
        super().__init__(memory)
        self.fault, self.at, self.claims = fault, at, 0

    def claim(self) -> Claim | None:
        if self.fault == "lock" and self.claims >= self.at:
            with self.memory.locked():
                die()
        if self.fault == "stopped idle" and self.claims >= self.at:
            self.stop()
        claim = super().claim()
        self.claims += claim is not None
        if claim is not None and self.claims >= self.at:
            if self.fault == "claim":
                die()
            if self.fault == "stopped maker":
                self.stop()
        return claim

    def next_claim(self, claim: Claim, records: int, *, spoiled: bool) -> Claim | None:
        self.done(claim, records, spoiled=spoiled)
        return self.claim()  # outside of the lock, so that a fault does not keep it

    def stop(self) -> None:
        self.fault = ""
        print(json.dumps({"stopped": os.getpid()}), flush=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no step further

    def _open(self, least: int) -> bool:
        opened = super()._open(least)
        if opened and self.fault == "open" and self.claims >= self.at:
            die()
        return opened

    def _complete(self, slot: Any) -> bool:
        words = [slot[index] for index in self._part_words]
        if self.fault == "last part" and self.claims >= self.at and min(words) >= DONE:
            die()
        return super()._complete(slot)


def content(unit: int, part: int) -> bytes:
    return (1000 * unit + part + 1).to_bytes(8, "little")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(orders: dict[str, Any]) -> None:
    cursors.SILENT_S = 0.3
    memory = SharedMemory(io.open_file(orders["path"], os.O_RDWR), (0, 0), "the ring", SHAPE)
    ring = Faulty(memory, orders.get("fault", ""), orders.get("at", 0))
    slots = memory.mapped_slots()
    with memory.locked():
        ring.join()
        cursor = Cursor(ring, ring.place, 1, slots, Patient(ring), Recording())
        cursor.enter(batch=1)
        first = ring.header.get("next")
        cursor.hold(first)
    print(json.dumps({"joined": ring.place, "pid": os.getpid()}), flush=True)
    sys.stdin.readline()
    slots, units = memory.mapped_slots(), cast("Units", Numbers())
    producers = Producers(ring, units, slots, "numbers", Recording(), ring.leave, lambda: None)
    producers.start()
    ring.arm(ring.place, orders["units"])
    for unit in range(first, orders["units"]):
        root, _, is_spoiled = cursor.take(unit)
        data = memoryview(root).cast("B")
        parts = [bytes(data[part * CELL : part * CELL + 8]) for part in range(SHAPE.parts)]
        assert parts == [content(unit, part) for part in range(SHAPE.parts)], (unit, parts)
        assert not is_spoiled
        del root, data
        cursor.roots = {}
    place, made = ring.place, ring.processes[ring.place].get("parts")
    cursor.close()
    cursors.leave(ring, place)
    ring.retire()
    producers.join(5.0)
    assert not any(thread.name.startswith("numbers") for thread in threading.enumerate())
    print(json.dumps({"taken": orders["units"] - first, "made": made}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
