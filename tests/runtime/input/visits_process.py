"""One process of an ensemble that counts its records, and may die during its work."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from input_plans import schedule

from commplan.diagnostics import CommplanError
from commplan.runtime.input.group import group
from commplan.runtime.input.iterator import PhaseBatches

PLAN = """
    raw, n = load images batch {batch} visit {visit} seed 11 tail {tail} {{ {hints} }}
    values = map widen(raw)
    values = share values over member via {design}
    output values, n
"""
DECLARATIONS = """
source images : i32
fn widen (i32) -> i32[2] on host
"""


class Widening:
    """The host function: the record and its square; kills this process at the given call. idle: seconds
    that it waits each time."""

    def __init__(self, die_at: int | None, idle: float) -> None:
        self.left, self.lock = die_at, threading.Lock()
        self.idle = idle
        self.made: list[int] = []

    def __call__(self, record: np.int32) -> np.ndarray[Any, Any]:
        self.made.append(int(record))
        if self.idle:
            time.sleep(self.idle)
        if self.left is not None:
            with self.lock:
                self.left -= 1
                if self.left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return np.array([record, record * record], np.int32)


def main(orders: dict[str, Any]) -> None:
    index, count = orders["index"], orders["count"]
    plan = {"batch": 64, "visit": "exactly_once", "tail": "pad", "hints": "on_failure = continue, cores = 1"}
    body = PLAN.format(**{**plan, "design": orders["design"], **orders.get("plan", {})})
    program = schedule(body, f"ensemble member = {orders['members']}", declarations=DECLARATIONS)
    source = np.arange(orders["records"], dtype=np.int32)
    widen = Widening(orders.get("die_at"), orders.get("idle", 0.0))
    if "cores" in orders:
        os.sched_setaffinity(0, orders["cores"])
    team = group(orders["run"], index, count, timeout=60.0)
    until = orders.get("until")
    visits: dict[int, list[list[int]]] = {}
    report: dict[str, Any] = {"index": index}
    try:
        with PhaseBatches(
            program, "step", {"images": source}, {"widen": widen},
            local={"member": orders["local"]}, group=team, state=orders.get("state"),
        ) as feed:  # fmt: skip
            print(json.dumps({"joined": os.getpid()}), flush=True)
            while until is None or [feed.state()["epoch"], feed.state()["step"]] != until:
                if feed.state()["epoch"] == orders["epochs"]:
                    break
                if feed.state()["step"] == 0 or not visits:
                    iter(feed)
                batch = next(feed)
                values, n = (batch.values[b.value] for b in program.phase("step").outputs)
                assert (values[:, 1] == values[:, 0] ** 2).all(), "no batch is torn"
                visits.setdefault(batch.epoch, []).append(values[: int(n), 0].tolist())
                if orders.get("die_after") == batch.number:
                    os.kill(os.getpid(), signal.SIGKILL)
                if "say" in orders:
                    print(json.dumps({"at": batch.number}), flush=True)
            report["state"] = feed.state()
            report["summary"] = [[line.what, line.records, line.skipped] for line in feed.summary().lines]
            report["checked"] = feed.summary().checked
    except CommplanError as error:
        report["error"] = str(error)
    report["seen"] = {epoch: [*itertools.chain(*batches)] for epoch, batches in visits.items()}
    report["made"] = widen.made
    report["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("commplan")]
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
