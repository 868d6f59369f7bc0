"""Two processes of a job that hold on to batches: python alias_processes.py PORT INDEX COUNT OUT."""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import commplan

RECORDS, BATCH, SIZE = 240, 8, 256
PLAN = f"""plan held
ensemble member = 2
source images : u8[{SIZE}]
fn decode (u8[{SIZE}]) -> u8[{SIZE}], i32 on host
each step {{
    raw       = load images batch {BATCH} visit exactly_once seed 3 {{ prefetch = 2 }}
    x, labels = map decode(raw)
    x         = share x over member via all_shared
    labels    = share labels over member via all_shared
    output x, labels
}}
"""


def decode(record: Any) -> Any:
    """Record i as its number in every byte."""
    return np.asarray(record), np.int32(record[0])


def in_shared_memory(pointer: int, maps: str) -> bool:
    for line in maps.splitlines():
        low, _, high = line.split(" ")[0].partition("-")
        if int(low, 16) <= pointer < int(high, 16):
            return "commplan" in line or "/dev/shm" in line or "O_TMPFILE" in line or "/#" in line
    return False


def wrong(x: Any, labels: Any) -> bool:
    return bool((np.asarray(x.addressable_shards[0].data) != np.asarray(labels)[:, None]).any())


def main(port: str, index: str, count: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    mesh = jax.make_mesh((2,), ("member",), (AxisType.Auto,))
    records = np.repeat(np.arange(RECORDS, dtype=np.uint8)[:, None], SIZE, 1)
    run = (
        commplan.loads(PLAN)
        .compile(mesh)
        .bind(mesh, sources={"images": records}, functions={"decode": decode})
    )
    spoil = jax.jit(lambda x: x + 1, donate_argnums=0)
    rng = random.Random(int(index))
    pending: deque[tuple[int, Any, np.ndarray[Any, Any]]] = deque()
    torn: list[int] = []
    received = shared = 0
    with run.batches() as batches:
        for _ in range(3):
            for item in batches:
                x = item["x"]
                labels = np.array(item["labels"].addressable_shards[0].data)
                pointer = x.addressable_shards[0].data.unsafe_buffer_pointer()
                shared += in_shared_memory(pointer, Path("/proc/self/maps").read_text())
                # Some are held until slots are scarce, some are released at once, some are donated.
                action = rng.randrange(3)
                if action == 0:
                    pending.append((received, x, labels))
                elif wrong(spoil(x) - 1 if action == 1 else x, labels):
                    torn.append(received)
                while len(pending) > rng.randrange(1, 6):
                    number, old, expected = pending.popleft()
                    if wrong(old, expected):
                        torn.append(number)
                    del old
                del x, item
                received += 1
        for number, old, expected in pending:
            if wrong(old, expected):
                torn.append(number)
    torn += [number for number, old, expected in pending if wrong(old, expected)]  # the batches are closed
    (Path(out) / f"{index}.json").write_text(
        json.dumps({"batches": received, "shared": shared, "torn": torn})
    )
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
