"""One process of a test of several: reads its instructions as JSON, prints its observations as JSON lines."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from folder_carrier import FolderCarrier
from input_plans import FUNCTIONS, Counting, decode, ensemble, images, schedule

from commplan.diagnostics import CommplanError
from commplan.input.work_partition import division
from commplan.ir.schedule import Schedule
from commplan.runtime.input.group import group
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.observe import wait_log
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.ring.ring import Ring


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(warned=record.getMessage())


def again_and_again(program: Schedule, source: object, index: int, count: int, run: str, cycles: int) -> None:
    """Open and close batches of one run many times; return the open resources after the first time and the
    last."""
    positions: list[list[int]] = []
    for _ in range(cycles):
        team = group(run, index, count, timeout=30.0)
        feed = PhaseBatches(
            program, "step", {"images": source}, FUNCTIONS, local={"member": (index,)}, group=team
        )
        steps = [batch.step for batch in feed]
        feed.close()
        del feed
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("/memfd:commplan")
        positions.append(
            [len(steps), len(list(Path("/proc/self/fd").iterdir())), maps, threading.active_count()]
        )
    say(first=positions[0], last=positions[-1])


def carrier_of(orders: dict[str, Any], hosts: list[int]) -> FolderCarrier:
    kind, _, readers = orders["design"].partition("(readers = ")
    split = division(kind, hosts, int(readers[:-1]) if readers else None)
    host = hosts[orders["index"]]
    by_caller, silence_s = orders.get("by_caller", False), orders.get("silence_s", 30.0)
    dies_at = orders.get("dies_at", -1)
    return FolderCarrier(Path(orders["carrier"]), host, split, by_caller, silence_s, dies_at)


def state_of(orders: dict[str, Any], program: Schedule, source: object) -> dict[str, int] | None:
    """The state that was ordered, or the place `at`, in the order of this plan."""
    if "at" not in orders:
        return orders.get("state")
    with PhaseBatches(program, "step", {"images": source}, FUNCTIONS) as feed:
        return {**feed.state(), **orders["at"]}


def changed_by_a_fork(feed: PhaseBatches, when: str) -> bool:
    """Fork a process that drops its copy of the batches, and check that this leaves the batches here
    unchanged."""
    batch = None if when == "before" else next(feed)
    if batch is not None:
        say(step=batch.step)
    time.sleep(0.3)
    before = None if batch is None else {ref: array.tobytes() for ref, array in batch.values.items()}
    child = os.fork()
    if child == 0:
        del batch
        feed.close()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.8)
    return batch is not None and before != {ref: array.tobytes() for ref, array in batch.values.items()}


def look_late(seconds: float) -> None:
    """Let the thread that moves batches ignore other processes in the first `seconds` of each wait."""
    look = GroupExchange.look

    def late(self: GroupExchange, unit: int, waited: float) -> None:
        if waited > seconds or not threading.current_thread().name.endswith("-carry"):
            look(self, unit, waited)

    GroupExchange.look = late


def reap_late() -> None:
    """Let this process free the claims of dead processes only after it has found one on a transfer."""
    reap, begin_carry, is_found = Ring.reap, Ring.begin_carry, threading.Event()

    def begun(self: Ring, unit: int) -> bool:
        if begin_carry(self, unit):
            return True
        is_found.set()
        return False

    Ring.begin_carry = begun
    Ring.reap = lambda self: is_found.is_set() and reap(self)


def main(orders: dict[str, Any]) -> None:
    index, count = orders["index"], orders["count"]
    program = (
        schedule(orders["body"], orders["axes"], pipeline=orders.get("pipeline", ""))
        if "body" in orders
        else ensemble(orders["design"], orders.get("members", count), hints=orders.get("hints", ""))
    )
    source = Counting(images(orders.get("records", 40)), delay=orders.get("delay", 0.0))
    if "cycles" in orders:
        again_and_again(program, source, index, count, orders["run"], orders["cycles"])
        return
    bad = orders.get("bad")

    def broken(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        if bad is not None and record[0] in bad:
            raise ValueError("truncated")
        return decode(record)

    local = {axis: tuple(indices) for axis, indices in orders.get("local", {"member": [index]}).items()}
    team, carrier = None, None
    if orders.get("run"):
        places = orders.get("hosts", [0] * count)
        if len(set(places)) > 1:
            carrier = carrier_of(orders, places)
        team = group(
            orders["run"], index, count, timeout=orders.get("timeout", 30.0), hosts=places, carrier=carrier
        )
    time.sleep(orders.get("late", 0.0))
    if "look_late" in orders:
        look_late(orders["look_late"])
    if orders.get("reap_late"):
        reap_late()
    wait_log.USUAL_S = orders.get("usual_s", wait_log.USUAL_S)
    logging.getLogger("commplan.input").addHandler(Said())
    try:
        functions = {**FUNCTIONS, "decode": broken}
        sources = {"images": source}
        with PhaseBatches(
            program,
            "step",
            sources,
            functions,
            local=local,
            group=team,
            state=state_of(orders, program, source),
        ) as feed:
            if "then_timeout" in orders and feed.exchange is not None:  # now that all have come
                feed.exchange.group = replace(feed.exchange.group, timeout=orders["then_timeout"])
            say(joined=os.getpid())
            if orders.get("forks"):
                say(changed=changed_by_a_fork(feed, orders["forks"]))
            for _ in range(orders.get("epochs", 1)):
                for number, batch in enumerate(feed):
                    say(
                        step=batch.step,
                        epoch=batch.epoch,
                        sums={ref: zlib.crc32(a.tobytes()) for ref, a in batch.values.items()},
                        count=[int(a) for a in batch.values.values() if a.ndim == 0],
                    )
                    if number == orders.get("stop_after"):
                        feed.close()
                        say(closed=True, state=feed.state())
                        return
                    if number in orders.get("pauses", [number]):
                        time.sleep(orders.get("pause", 0.0))
            lines = {line.what: [line.records, line.nbytes] for line in feed.summary().lines}
            say(read=sorted(source.read), lines=lines, state=feed.state())
    except CommplanError as error:
        diagnostic = error.diagnostics[0]
        notes = [note.text for note in diagnostic.notes]
        say(
            code=diagnostic.code,
            message=diagnostic.message,
            line=diagnostic.span and diagnostic.span.line,
            notes=notes,
        )
    if carrier is not None:
        say(carrier=[carrier.carried, carrier.closed], counted=carrier.counted)
    say(threads=[t.name for t in threading.enumerate() if t.name.startswith("commplan")])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
