"""One process of a test, with members with independent clocks: orders as JSON, answers as JSON lines."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import zlib
from typing import Any

import numpy as np
from input_plans import FUNCTIONS, Counting, images
from multirate_plans import BODY, rates

from commplan.diagnostics import CommplanError
from commplan.runtime.input.group import group
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.multirate.clocked import ClockedBatches, ClockedPhase, PeerGroup, SharingOptions
from commplan.runtime.input.multirate.schedule import clock_plan
from commplan.runtime.input.observe import wait_log

_LOCK = threading.Lock()


def say(**fields: Any) -> None:
    with _LOCK:
        print(json.dumps(fields), flush=True)


def sums(batch: HostBatch) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(a).tobytes()) for _, a in sorted(batch.values.items())]


def told(member: int, batch: HostBatch) -> None:
    say(
        member=member,
        epoch=batch.epoch,
        step=batch.step,
        sums=sums(batch),
        ids=[ids.ravel().tolist() for ids in batch.records.values()],
    )


def drive(feed: ClockedBatches, orders: dict[str, Any]) -> None:
    """A member's epochs, at the pace of the instructions."""
    mine = orders.get("members", {}).get(str(feed.member), {})
    checked: list[tuple[HostBatch, list[int]]] = []
    try:
        for _ in range(mine.get("epochs", 1)):
            for number, batch in enumerate(feed):
                told(feed.member, batch)
                checked += [(batch, sums(batch))] if mine.get("keep") else []
                time.sleep(mine.get("pace", 0.0))
                if number == mine.get("die"):
                    os.kill(os.getpid(), 9)
                if number == mine.get("close"):
                    feed.close()
                    return
                if number == mine.get("stay"):
                    say(stays=feed.member)
                    sys.stdin.readline()
        say(done=feed.member, state=feed.state(), changed=sum(sums(batch) != was for batch, was in checked))
        if mine.get("linger"):
            sys.stdin.readline()
    except CommplanError as error:
        say(member=feed.member, error=error.diagnostics[0].code, text=str(error))


class Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(warned=record.getMessage())


def main(orders: dict[str, Any]) -> None:
    wait_log.TELL_S = orders.get("tell", wait_log.TELL_S)
    logging.getLogger("commplan.input").addHandler(Said())
    program = rates(orders["batches"], orders["rest"], body=orders.get("body", BODY))
    source = Counting(images(orders["records"]), delay=orders.get("delay", 0.0))
    hub = ClockedPhase(clock_plan(program, "step"), {"images": source}, FUNCTIONS)
    team = group(orders["run"], orders["index"], len(orders["held"]), timeout=60.0)
    peer_group = PeerGroup(team, orders.get("start", 0), tuple(members[0] for members in orders["held"]))
    states, units = orders.get("states", {}), hub.plan.units
    assert units is not None
    options = SharingOptions(lambda _: peer_group, workers=orders.get("workers", "threads"))
    mine = orders["held"][orders["index"]]
    feeds = [ClockedBatches(hub, m, units, options=options, state=states.get(str(m))) for m in mine]
    threads = [threading.Thread(target=drive, args=(feed, orders)) for feed in feeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = feeds[0].summary()
    for feed in feeds:
        feed.close()
    slow = summary.slow
    running = [t.name for t in threading.enumerate() if t.name.startswith("commplan")]
    say(read=sorted(source.read), slow=None if slow is None else [slow.member, slow.wait_s > 0], left=running)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
