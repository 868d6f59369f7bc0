"""A program with a cached function, started by hand; prints its actions and the number of calls as JSON.

python cache_process.py '{"epochs": 2, "wait": true}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from typing import Any

import numpy as np

import commplan
from commplan.ir.schedule import Schedule
from commplan.runtime.input.cache import table
from commplan.runtime.input.iterator import PhaseBatches

PLAN = """
plan cached
ensemble member = ?
source numbers : i64
fn widen (i64)     -> i64[64] on host
fn decode(i64[64]) -> i64[64], i32 on host
fn noise (i64[64]) -> i64[64] on host random
each step {{
    raw, n       = load numbers batch 8 {order} visit exactly_once seed 7 {hints}
    wide         = map widen(raw)
    rows, labels = map decode(wide) {{ {cache} }}
    mine         = map noise(rows) per member
    output rows, labels, mine, n
}}
"""


# Caches of one key are shared by all processes of a host: other workers of the tests have other keys.
WORKER = f"{os.environ.get('PYTEST_XDIST_TESTRUNUID', '')} {os.environ.get('PYTEST_XDIST_WORKER', '')}"


class Counted:
    """A function that counts its calls. key: does not depend on their number."""

    def __init__(self, name: str, factor: int = 3, bad: int = -1) -> None:
        self.key, self.factor, self.calls, self.bad = f"{name} {factor} {WORKER}", factor, 0, bad
        self.pace, self.stops = 0.0, False

    def __call__(self, row: Any) -> Any:
        self.calls += 1
        if np.ndim(row) == 0:
            return np.full(64, row)
        if row[0] == self.bad:
            raise ValueError("truncated")
        time.sleep(self.pace)
        if self.stops:
            self.stops = False
            say(stops=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return row * self.factor, np.int32(row[0] % 100)


def noise(row: Any, rng: Any) -> Any:
    return row + rng.integers(0, 9, row.shape)


def functions(factor: int = 3, bad: int = -1) -> dict[str, Any]:
    return {"widen": Counted("widen"), "decode": Counted("decode", factor, bad), "noise": noise}


def text(cache: str = "cache = 1 MiB", order: str = "", hints: str = "") -> str:
    return PLAN.format(cache=cache or "cores = 8", order=order, hints=hints)


def schedule(members: int = 2, **options: str) -> Schedule:
    return commplan.loads(text(**options)).compile(axes={"member": members}).schedule


def epoch(batches: PhaseBatches) -> dict[str, int]:
    """Checksums of the values of an epoch; batches are in one order whatever is cached."""
    sums: dict[str, int] = {}
    for batch in batches:
        for name, array in batch.values.items():
            sums[name] = zlib.crc32(np.ascontiguousarray(array).tobytes(), sums.get(name, 0))
    return sums


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def die_in_row(write: Any, number: int) -> Any:
    """`table._write` that writes half of the data of call `number`, and ends the process."""
    calls = 0

    def half(descriptor: int, data: Any, offset: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            write(descriptor, memoryview(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        write(descriptor, data, offset)

    return half


def main(orders: dict[str, Any]) -> None:
    say(ready=os.getpid())
    called = functions(orders.get("factor", 3))
    with PhaseBatches(
        schedule(cache=orders["cache"], hints=orders.get("hints", "")),
        "step",
        {"numbers": np.arange(40)},
        called,
    ) as batches:
        say(opened=True)
        called["decode"].pace, called["decode"].stops = orders.get("pace", 0.0), orders.get("stop", False)
        if orders.get("start"):
            sys.stdin.readline()
        if orders.get("die"):
            table._write = die_in_row(table._write, orders["die"])
        for _ in range(orders.get("epochs", 1)):
            before = called["decode"].calls
            sums = epoch(batches)
            say(sums=sums, calls=called["decode"].calls - before)
        if orders.get("wait"):
            say(waits=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
