"""A member in a separate process, without JAX: python same_bits_process.py DESIGN RUN PLACE."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from commplan import compiler, dsl
from commplan.ir.schedule import Schedule, Share
from commplan.runtime.input import PhaseBatches, group

PLANS = Path(__file__).parents[2] / "examples" / "plans"
MEMBERS, RECORDS = 4, 160  # two batches of 64 and one of 32, padded
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def records() -> list[bytes]:
    return [
        bytes(np.random.default_rng(number).integers(0, 256, 56 * 56 * 3, np.uint8))
        for number in range(RECORDS)
    ]


def decode(record: bytes) -> Pixels:
    small = np.frombuffer(record, np.uint8).reshape(56, 56, 3)
    return np.ascontiguousarray(small.repeat(4, 0).repeat(4, 1))


def augment(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    down, right = rng.integers(0, 32, 2)
    moved = np.roll(pixels, (int(down), int(right)), (0, 1))
    return moved[:, ::-1] if rng.random() < 0.5 else moved


FUNCTIONS = {"decode": decode, "augment": augment}


def compiled(name: str, pipeline: str | None) -> Schedule:
    path = PLANS / f"{name}.plan"
    plan, problems = dsl.load(path.read_text(), path.name)
    assert plan is not None, problems
    return compiler.compile_plan(plan, {}, passes=pipeline)


def main(design: str, run_id: str, place: int) -> None:
    kind, _, readers = design.partition("(readers=")
    options = f"design={kind}" + (f",readers={readers.rstrip(')')}" if readers else "")
    schedule = compiled("ensemble_shared", f"share{{{options}}}")
    assert any(isinstance(op, Share) and op.design == kind for op in schedule.phase("step").ops)
    team = group(run_id, place, MEMBERS, timeout=120.0)
    local = {"member": (place,)}
    with PhaseBatches(schedule, "step", {"images": records()}, FUNCTIONS, local=local, group=team) as batches:
        sums = [
            [zlib.crc32(np.ascontiguousarray(array[0])) for array in batch.values.values()]
            for batch in batches
        ]
        summary = batches.summary()
    lines = {line.what: line.records for line in summary.lines}
    slots = [summary.queue.slots, summary.queue.used]
    print(json.dumps({"sums": sums, "decoded": lines["map decode"], "slots": slots}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
