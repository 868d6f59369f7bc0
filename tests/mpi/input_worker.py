"""One rank that acts as a process of a ring: it fills the parts of its host, and transfers batch after batch.

    input_worker.py FOLDER '{"design": "all_shared", "hosts": [0, 1, 1], "batches": 5, ...}'

The hosts are those of the argument: messages go over MPI between ranks of one machine as between machines.
Prints the observations of every rank as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
from mpi4py import MPI

from commplan.diagnostics import CommplanError, Span, fail
from commplan.input.work_partition import Division, division
from commplan.lowering.mpi import build
from commplan.runtime.input.group import Blame
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.transport.mpi import MpiCarrier
from commplan.runtime.input.transport.transport import RegroupedError, RowSlices

BLAME = Blame("share pixels via all_shared", Span(7, 5, 7, 40), "input.plan")
SIZES = ((1, 150_000), (2, 3000), (1, 4), (3, 1))  # copies, bytes of a row


def content(number: int, array: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([number, array]).integers(1, 256, shape, np.uint8)


class Slot:
    """The arrays of one batch, with the parts that this host has made."""

    def __init__(self, found: Division, number: int, rows: int, last: int) -> None:
        self.number = number
        used = last if number % 3 == 2 else rows
        bounds = (*tuple(found.part(used, part)[0] for part in range(found.parts)), used)
        self.used = used
        memory = np.zeros(sum(copies * rows * nbytes for copies, nbytes in SIZES), np.uint8)
        self.row_slices: list[RowSlices] = []
        for copies, nbytes in SIZES:
            cells, memory = memory[: copies * rows * nbytes], memory[copies * rows * nbytes :]
            self.row_slices.append(RowSlices(cells.reshape(copies, rows, nbytes), bounds))

    def fill(self, found: Division, host: int) -> None:
        for array, slices in enumerate(self.row_slices):
            whole = content(self.number, array, slices.cells.shape)
            for part, reader in enumerate(found.readers):
                if found.hosts[reader] == host:
                    low, high = slices.bounds[part], slices.bounds[part + 1]
                    slices.cells[:, low:high] = whole[:, low:high]

    def wrong(self) -> bool:
        return any(
            not np.array_equal(
                p.cells[:, : self.used], content(self.number, i, p.cells.shape)[:, : self.used]
            )
            for i, p in enumerate(self.row_slices)
        )


def lose_thread(name: str) -> None:
    """End a thread of this process from outside."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    number, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
    thread.join(30)


def no_engine() -> NoReturn:
    fail("CP0830", "the MPI engine cannot be compiled: no mpicxx was found")


def speak(
    carrier: MpiCarrier, me: int, words: dict[str, Any], first: int, said: dict[str, Any], marks: Path
) -> None:
    """Carry the batches from `first` on, as the leader of this process's host does."""
    found, host = carrier.division, carrier.division.hosts[me]
    before: Slot | None = None
    if first:  # a successor finds the last batch in the memory of its host
        before = Slot(found, first - 1, words["rows"], words["last"])
        for each in range(len(found.hosts)):
            before.fill(found, found.hosts[each])
    for number in range(first, words["batches"]):
        if number == words.get("leave", {}).get(str(me)):
            return
        slot = Slot(found, number, words["rows"], words["last"])
        slot.fill(carrier.division, host)
        if number == words.get("die", {}).get(str(me)):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == words.get("lose", {}).get(str(me)):
            lose_thread("commplan-survivors")
        time.sleep(words.get("pause", {}).get(str(me), 0.0))
        while True:
            try:
                last = before.row_slices if before else ()
                carrier.carry(
                    number, slot.row_slices, last, is_wanted=lambda: me not in words.get("unhurried", [])
                )
                break
            except RegroupedError as again:
                said["regrouped"].append([again.number, list(again.division.readers)])
                slot.fill(again.division, host)
        if slot.wrong():
            said["wrong"].append(number)
        said["carried"].append(number)
        mark(marks, host, number + 1)
        before = slot


def main() -> None:
    marks, words = Path(sys.argv[1]), json.loads(sys.argv[2])
    comm = MPI.COMM_WORLD
    me = comm.Get_rank()
    if me in words.get("without_engine", []):
        mock.patch.object(build, "library", no_engine).start()
    pids = comm.allgather(os.getpid())
    found = division(words["design"], words["hosts"], words.get("readers"))
    said: dict[str, Any] = {"process": me, "wrong": [], "carried": [], "regrouped": [], "error": None}
    began = time.process_time()
    try:
        carrier = MpiCarrier(
            comm.Dup(),
            found,
            blame=BLAME,
            on_failure=words.get("on_failure", "stop"),
            timeout=words.get("timeout", {}).get(str(me), 30.0),
        )
        try:
            host = found.hosts[me]
            mine = [process for process, other in enumerate(found.hosts) if other == host]
            while alive := [p for p in mine[: mine.index(me)] if running(pids[p])]:
                if marked(marks, host) == words["batches"]:
                    break
                time.sleep(0.02)
            if not alive:
                speak(carrier, me, words, marked(marks, host), said, marks)
                said["bytes"] = [carrier.sent, carrier.received]
        finally:
            carrier.close()
            carrier.close()
    except CommplanError as error:
        said["error"] = str(error.diagnostics[0].code) + ": " + error.diagnostics[0].message
    except ClosedError:
        said["error"] = "closed"
    said["cpu"] = time.process_time() - began
    (marks / f"said-{me}.json").write_text(json.dumps(said))


def mark(marks: Path, host: int, carried: int) -> None:
    """Write down how many batches a host has, as a ring does in its memory."""
    new = marks / f"{host}.new"
    new.write_text(str(carried))
    new.rename(marks / f"{host}")


def marked(marks: Path, host: int) -> int:
    place = marks / f"{host}"
    return int(place.read_text()) if place.exists() else 0


def running(pid: int) -> bool:
    """Whether a process lives; one that has died and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    main()
