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


def carrier(split: Division, index: int, timeout: float = 60.0) -> JaxCarrier:
    """Process i of jax.distributed is process i of the division."""
    leaders = [split.leader(host) for host in dict.fromkeys(split.hosts)]
    return JaxCarrier(split, split.hosts[index], cpu_devices(leaders), timeout, BLAME)


def leads(split: Division, index: int) -> bool:
    return split.leader(split.hosts[index]) == index


def batch(split: Division, number: int, rows: int) -> list[RowSlices]:
    """The expected slot of every process, including the notes of the parts; it has room for ROWS rows."""
    random = np.random.default_rng(number)
    bounds = (*(split.part(rows, part)[0] for part in range(split.parts)), rows)
    whole = [
        RowSlices(random.integers(0, 256, (copies, ROWS, nbytes), np.uint8), bounds)
        for copies, nbytes in WIDTHS.values()
    ]
    notes = random.integers(0, 256, (1, split.parts, 50), np.uint8)
    whole.append(RowSlices(notes, tuple(range(split.parts + 1))))
    return whole


def own(split: Division, index: int, whole: list[RowSlices]) -> list[RowSlices]:
    """Only the parts of the process's host."""
    low, high = split.part_range(split.hosts[index])
    row_slices = []
    for slices in whole:
        cells = np.full_like(slices.cells, 99)
        rows = slice(slices.bounds[low], slices.bounds[high])
        cells[:, rows] = slices.cells[:, rows]
        row_slices.append(RowSlices(cells, slices.bounds))
    return row_slices


def everything(index: int) -> dict[str, object]:
    """Every design, number of readers and layout of hosts; full batches, short ones, full ones again."""
    tried = 0
    for split in divisions():
        if not split.moves() or not leads(split, index):
            continue
        mover = carrier(split, index)
        rows = [ROWS, ROWS, 6, 2, ROWS]
        for number, count in enumerate(rows):
            whole = batch(split, number, count)
            mine = own(split, index, whole)
            mover.carry(number, mine)
            for got, expected in zip(mine, whole, strict=True):
                end = expected.bounds[-1]
                np.testing.assert_array_equal(got.cells[:, :end], expected.cells[:, :end], repr(split))
                assert (got.cells[:, end:] == 99).all(), "rows behind the batch's end were written to"
        assert mover.launched == len(rows)
        mover.close()
        tried += 1
    return {"tried": tried}


def lost(index: int) -> dict[str, object]:
    """Process 1 dies, or is silent: the others report it."""
    split = division("all_shared", tuple(range(jax.process_count())))
    mover = carrier(split, index)
    whole = batch(split, 0, ROWS)
    mover.carry(0, own(split, index, whole))
    if index == 1:
        os._exit(9)
    began = time.monotonic()
    try:
        mover.carry(1, own(split, index, whole), count=9)
    except CommplanError as error:
        diagnostic = error.diagnostics[0]
        line, after = diagnostic.span and diagnostic.span.line, time.monotonic() - began
        return {"code": diagnostic.code, "line": line, "after": after, "message": diagnostic.message}
    return {}


def silent(index: int) -> dict[str, object]:
    split = division("all_shared", tuple(range(jax.process_count())))
    mover = carrier(split, index)
    whole = batch(split, 0, ROWS)
    mover.carry(0, own(split, index, whole))
    mover.timeout = 0.5
    if index == 1:
        return {}  # it lives until the others have spoken
    try:
        mover.carry(1, own(split, index, whole), count=9)
    except CommplanError as error:
        return {"code": error.diagnostics[0].code, "message": error.diagnostics[0].message}
    return {}


def main(port: str, index: str, count: str, case: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    report = {"everything": everything, "lost": lost, "silent": silent}[case](int(index))
    (Path(out) / f"{index}.json").write_text(json.dumps(report))
    if case != "everything":
        heard = int(count) - (case == "lost")
        for _ in range(600):  # process 0 is the coordinator: those that outlive it are ended
            if len(list(Path(out).glob("*.json"))) >= heard:
                break
            time.sleep(0.1)
        os._exit(0)  # a collective is under way that will never end
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
