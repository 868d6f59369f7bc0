"""Host workers: threads against processes, for a function that is Python through and through and for one that
lets go of the interpreter lock.

    python -m bench.workers [--records 256] [--cores 1,2] [--rounds 5] [--out FILE.json]

The Python function adds up a record byte by byte; the other decodes a JPEG with Pillow and resizes it to 224
x 224. Each cell is a process of its own, under one setting of the allocator; the first epoch is left out.
Wall seconds are those of whole epochs with a consumer that only takes batches; CPU is user and system, of the
process and of its workers. Batches of both kinds are compared by their checksums.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.input.records import PREFIX, decode, jpegs
from bench.input.team import MALLOC
from commplan import compiler, dsl
from commplan.runtime.input import PhaseBatches

BATCH = 32
WORK = 24_000  # bytes that the Python function adds up: a millisecond or two
PLAN = """
plan workers
ensemble member = 1
source images : bytes
fn decode(bytes) -> u8[224, 224, 3] on host
fn python(bytes) -> i32 on host
each step {{
    raw  = load images batch {batch} visit exactly_once seed 17 tail short {{ cores = {cores} }}
    made = map {function}(raw)
    output made
}}
"""


class Cell(msgspec.Struct, frozen=True):
    """One way. wall_s, cpu_s: per record, one for each epoch. sum: of all batches of an epoch."""

    function: str
    workers: str
    cores: int
    wall_s: list[float]
    cpu_s: list[float]
    sum: int


def python(record: bytes) -> npt.NDArray[np.int32]:
    """What holds the interpreter lock all along."""
    total = 0
    for byte in record[:WORK]:
        total = (total * 31 + byte) & 0x7FFFFFFF
    return np.array(total, np.int32)


FUNCTIONS: Mapping[str, Callable[[bytes], Any]] = {"python": python, "decode": decode}


def measured(function: str, workers: str, cores: int, records: int, rounds: int) -> Cell:
    """One cell, in this process."""
    plan, problems = dsl.load(PLAN.format(batch=BATCH, cores=cores, function=function), "workers.plan")
    if plan is None:
        sys.exit(f"the plan does not load: {problems}")
    compiled = compiler.compile_plan(plan, {})
    source = [number.to_bytes(PREFIX, "little") + jpeg for number, jpeg in enumerate(jpegs(records))]
    cell = Cell(function, workers, cores, [], [], 0)
    total = 0
    with PhaseBatches(compiled, "step", {"images": source}, FUNCTIONS, workers=workers) as feed:
        for number in range(rounds + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            before = feed.summary().cpu_s if workers == "processes" else 0.0
            total = 0
            for batch in feed:
                for array in batch.values.values():
                    total = zlib.crc32(np.ascontiguousarray(array).data, total) if number == 0 else total
            if number == 0:
                cell = msgspec.structs.replace(cell, sum=total)
                continue
            # A worker tells all its CPU time with each block; threads are of this process.
            theirs = feed.summary().cpu_s - before if workers == "processes" else 0.0
            cell.wall_s.append((time.perf_counter() - wall) / records)
            cell.cpu_s.append((time.process_time() - cpu + theirs) / records)
    return cell


def main() -> None:
    reads = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reads.add_argument("--records", type=int, default=256)
    reads.add_argument("--cores", default="1,2")
    reads.add_argument("--rounds", type=int, default=5)
    reads.add_argument("--out", type=Path)
    reads.add_argument("--cell", help=argparse.SUPPRESS)
    given = reads.parse_args()
    if given.cell:
        function, workers, cores = given.cell.split(",")
        cell = measured(function, workers, int(cores), given.records, given.rounds)
        sys.stdout.buffer.write(msgspec.json.encode(cell))
        return
    cells = [
        asked(function, workers, int(cores), given)
        for function in FUNCTIONS
        for cores in given.cores.split(",")
        for workers in ("threads", "processes")
    ]
    for function in FUNCTIONS:
        sums = {cell.sum for cell in cells if cell.function == function}
        if len(sums) != 1:
            sys.exit(f"batches of `{function}` differ between the ways: {sums}")
    print(f"{'function':10}{'workers':>14}{'wall ms':>10}{'CPU ms':>10}   (per record, median)")
    for cell in cells:
        wall, cpu = statistics.median(cell.wall_s), statistics.median(cell.cpu_s)
        label = f"{cell.cores} {cell.workers}"
        print(f"{cell.function:10}{label:>14}{wall * 1e3:>10.3f}{cpu * 1e3:>10.3f}")
    if given.out:
        given.out.write_bytes(msgspec.json.encode(cells))


def asked(function: str, workers: str, cores: int, given: argparse.Namespace) -> Cell:
    """One cell, in a process of its own."""
    command = [sys.executable, "-m", "bench.workers", "--cell", f"{function},{workers},{cores}"]
    command += ["--records", str(given.records), "--rounds", str(given.rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **MALLOC}, check=True)
    return msgspec.json.decode(done.stdout, type=Cell)


if __name__ == "__main__":
    main()
