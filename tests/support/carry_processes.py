"""Processes of jax.distributed that call a carrier: python carry_processes.py PORT INDEX COUNT WHAT OUT."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from commplan.diagnostics import CommplanError, Span
from commplan.input.work_partition import Division, division
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.jax import JaxCarrier, cpu_devices
from commplan.runtime.input.transport.transport import RowSlices

BLAME = Blame("share x via all_shared", Span(7, 5, 7, 9), "tested.plan")
ROWS = 13
WIDTHS = {"pixels": (1, 97), "labels": (1, 4), "copies": (3, 8)}


def divisions() -> Iterator[Division]:
    layouts = ((0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 1, 0), (2, 2, 2, 1), (0, 0, 1, 2))
    for number, hosts in enumerate(layouts):
        yield division("all_shared", hosts)
        for readers in (1, 3) if number % 2 else (2, 4):
            yield division("single_broadcast", hosts, readers)
            yield division("multi_broadcast", hosts, readers)


def carrier(found: Division, index: int, timeout: float = 60.0) -> JaxCarrier:
    """Process i of jax.distributed is process i of the division."""
    leaders = [found.leader(host) for host in dict.fromkeys(found.hosts)]
    return JaxCarrier(found, found.hosts[index], cpu_devices(leaders), timeout, BLAME)


def leads(found: Division, index: int) -> bool:
    return found.leader(found.hosts[index]) == index


def batch(found: Division, number: int, rows: int) -> list[RowSlices]:
    """The expected slot of every process, including the notes of the parts; it has room for ROWS rows."""
    random = np.random.default_rng(number)
    bounds = (*(found.part(rows, part)[0] for part in range(found.parts)), rows)
    whole = [
        RowSlices(random.integers(0, 256, (copies, ROWS, nbytes), np.uint8), bounds)
        for copies, nbytes in WIDTHS.values()
    ]
    notes = random.integers(0, 256, (1, found.parts, 50), np.uint8)
    whole.append(RowSlices(notes, tuple(range(found.parts + 1))))
    return whole


def own(found: Division, index: int, whole: list[RowSlices]) -> list[RowSlices]:
    """Only the parts of the process's host."""
    low, high = found.part_range(found.hosts[index])
    parcels = []
    for parcel in whole:
        cells = np.full_like(parcel.cells, 99)
        here = slice(parcel.bounds[low], parcel.bounds[high])
        cells[:, here] = parcel.cells[:, here]
        parcels.append(RowSlices(cells, parcel.bounds))
    return parcels


def everything(index: int) -> dict[str, object]:
    """Every design, number of readers and layout of hosts; full batches, short ones, full ones again."""
    tried = 0
    for found in divisions():
        if not found.moves() or not leads(found, index):
            continue
        mover = carrier(found, index)
        rows = [ROWS, ROWS, 6, 2, ROWS]
        for number, count in enumerate(rows):
            whole = batch(found, number, count)
            mine = own(found, index, whole)
            mover.carry(number, mine)
            for got, wanted in zip(mine, whole, strict=True):
                end = wanted.bounds[-1]
                np.testing.assert_array_equal(got.cells[:, :end], wanted.cells[:, :end], repr(found))
                assert (got.cells[:, end:] == 99).all(), "rows behind the batch's end were written to"
        assert mover.launched == len(rows)
        mover.close()
        tried += 1
    return {"tried": tried}


def lost(index: int) -> dict[str, object]:
    """Process 1 dies, or is silent: the others report it."""
    found = division("all_shared", tuple(range(jax.process_count())))
    mover = carrier(found, index)
    whole = batch(found, 0, ROWS)
    mover.carry(0, own(found, index, whole))
    if index == 1:
        os._exit(9)
    began = time.monotonic()
    try:
        mover.carry(1, own(found, index, whole), count=9)
    except CommplanError as error:
        one = error.diagnostics[0]
        line, after = one.span and one.span.line, time.monotonic() - began
        return {"code": one.code, "line": line, "after": after, "message": one.message}
    return {}


def silent(index: int) -> dict[str, object]:
    found = division("all_shared", tuple(range(jax.process_count())))
    mover = carrier(found, index)
    whole = batch(found, 0, ROWS)
    mover.carry(0, own(found, index, whole))
    mover.timeout = 0.5
    if index == 1:
        return {}  # it lives until the others have spoken
    try:
        mover.carry(1, own(found, index, whole), count=9)
    except CommplanError as error:
        return {"code": error.diagnostics[0].code, "message": error.diagnostics[0].message}
    return {}


def main(port: str, index: str, count: str, what: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    said = {"everything": everything, "lost": lost, "silent": silent}[what](int(index))
    (Path(out) / f"{index}.json").write_text(json.dumps(said))
    if what != "everything":
        heard = int(count) - (what == "lost")
        for _ in range(600):  # process 0 is the coordinator: those that outlive it are ended
            if len(list(Path(out).glob("*.json"))) >= heard:
                break
            time.sleep(0.1)
        os._exit(0)  # a collective is under way that will never end
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
