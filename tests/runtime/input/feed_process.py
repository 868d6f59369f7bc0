"""A program that joins a feed, started by hand: instructions as JSON, results as JSON lines.

    python feed_process.py '{"name": "sweep", "epochs": 2, ..}'

It has no JAX: importing it fails.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
import time
import zlib
from typing import Any

if __name__ == "__main__":
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]

import numpy as np

import commplan
from commplan.runtime.input.feeds.batch import Batch
from commplan.runtime.input.observe import wait_log

PLAN = """
plan fed
ensemble member = ?
source numbers : i64
fn decode(i64) -> u8[12, 12], i64 on host
fn noise(u8[12, 12]) -> u8[12, 12] on host random
each step {{
    raw, n         = load numbers batch {batch} visit {visit} seed 7 {tail} {hints}
    pixels, labels = map decode(raw)
    pixels         = map noise(pixels)
    mine           = map noise(pixels) per member
    output pixels, labels, mine, n
}}
"""
DEFAULTS = {"batch": 4, "visit": "exactly_once", "tail": "", "hints": ""}
STATE = {"decoded": 0, "die_at": 0, "bad": -1, "hangs": -1}
HANG = [threading.Event(), threading.Event()]  # a function hangs; it goes on


def text(**options: Any) -> str:
    return PLAN.format(**{**DEFAULTS, **options})


def records(count: int) -> Any:
    return np.arange(count, dtype=np.int64)


def decode(number: Any) -> tuple[Any, Any]:
    STATE["decoded"] += 1
    if STATE["decoded"] == STATE["die_at"]:
        os.kill(os.getpid(), 9)
    if number == STATE["bad"]:
        raise ValueError("truncated")
    if number == STATE["hangs"]:
        HANG[0].set()
        HANG[1].wait()
    return np.full((12, 12), number % 200, np.uint8), np.int64(number)


def noise(pixels: Any, rng: Any) -> Any:
    return pixels + rng.integers(0, 50, pixels.shape, np.uint8)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def report(batch: Any, member: int) -> None:
    sums = {name: zlib.crc32(np.ascontiguousarray(array).tobytes()) for name, array in batch.items()}
    counted = batch["labels"][: int(batch["n"])].tolist()
    say(member=member, epoch=batch.epoch, step=batch.step, sums=sums, records=counted)


def batches_of(feed: Any, torch: bool) -> Any:
    """An epoch, through PyTorch on request."""
    if not torch:
        yield from feed
        return
    data: Any = importlib.import_module("torch.utils.data")
    for tensors in data.DataLoader(feed.torch_dataset(), batch_size=None):
        place = feed.state()["epoch"] * feed.steps + feed.state()["step"] - 1
        batch = Batch((name, tensor.numpy()) for name, tensor in tensors.items())
        batch.epoch, batch.step = divmod(place, feed.steps)
        yield batch


def main(orders: dict[str, Any]) -> None:
    logging.basicConfig(format="%(message)s")
    wait_log.TELL_S = 0.3
    STATE.update(die_at=orders.get("die_at", 0), bad=orders.get("bad", -1))
    plan = commplan.loads(text(**orders.get("plan", {})))
    keys = ("member", "state", "batch", "timeout")
    options = {key: orders[key] for key in keys if key in orders}
    functions = {"decode": decode, "noise": noise}
    say(ready=os.getpid())
    if orders.get("wait"):
        sys.stdin.readline()
    source = records(orders.get("records", 26))
    with commplan.join(
        orders["name"], plan, sources={"numbers": source}, functions=functions, **options
    ) as feed:
        say(joined=feed.member, state=feed.state(), steps=feed.steps)
        for _ in range(orders.get("epochs", 1)):
            for number, batch in enumerate(batches_of(feed, orders.get("torch", False))):
                report(batch, feed.member)
                if number == orders.get("stop_at", -1):
                    say(saved=feed.state())
                    sys.stdin.readline()
                time.sleep(orders.get("pace", 0.0))
        say(ended=feed.state(), decoded=STATE["decoded"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
