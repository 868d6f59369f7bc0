"""Sharing changes what is paid, never what is seen: `ensemble_shared.plan` and `ensemble_duplicated.plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import mesh_of

import commplan
from commplan import compiler, dsl
from commplan.ir.schedule import Schedule, Share
from commplan.runtime.data import PhaseBatches, group

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
    return compiler.compile_plan(plan, {}, {}, pipeline=pipeline)


def trained(name: str, passes: str | None, epochs: int = 2) -> tuple[list[int], Any]:
    """A checksum of every batch, and the weights after a few steps of all members."""
    mesh = mesh_of(member=MEMBERS)
    run = (
        commplan.load(PLANS / f"{name}.plan")
        .compile(mesh, passes=passes)
        .bind(mesh, sources={"images": records()}, functions=FUNCTIONS)
    )

    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        def loss(own: Any, pixels: Any) -> Any:
            normal = pixels.astype(jnp.float32) / 127.5 - 1
            pooled = normal.reshape(len(pixels), 14, 16, 14, 16, 3).mean((2, 4)).reshape(len(pixels), -1)
            return jnp.mean((pooled @ own - 1.0) ** 2)

        return weights - 0.05 * jax.vmap(jax.grad(loss))(weights, batch)

    weights = jnp.zeros((MEMBERS, 14 * 14 * 3, 4))
    sums: list[int] = []
    with run.batches() as batches:
        for _ in range(epochs):
            for item in batches:
                sums.append(zlib.crc32(np.asarray(item["batch"])))
                weights = step(weights, item["batch"])
    return sums, np.asarray(weights)


def test_training_is_the_same_to_the_last_bit():
    sums, weights = trained("ensemble_duplicated", None)
    assert len(set(sums)) == 6 and np.abs(weights).max() > 0
    assert len({zlib.crc32(one) for one in weights}) == MEMBERS  # each member augments for itself
    for passes in (None, "share{design=all_shared}", "share{design=duplicate}"):
        others, trained_too = trained("ensemble_shared", passes)
        assert others == sums
        np.testing.assert_array_equal(trained_too, weights)


@pytest.mark.parametrize(
    "design", ["all_shared", "single_broadcast(readers=2)", "multi_broadcast(readers=3)"]
)
def test_members_in_processes_of_their_own_get_the_same_bits(design: str):
    schedule = compiled("ensemble_duplicated", "")
    with PhaseBatches(schedule, "step", {"images": records()}, FUNCTIONS) as batches:
        wanted = [
            [zlib.crc32(np.ascontiguousarray(array[m])) for array in batch.values.values()]
            for batch in batches
            for m in range(MEMBERS)
        ]
    run_id = f"bits-{os.getpid()}-{zlib.crc32(design.encode())}"
    command = [sys.executable, "-W", "error", __file__, design, run_id]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [*command, str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for place in range(MEMBERS)
    ]
    found: list[Any] = []
    for one in started:
        out, err = one.communicate(timeout=240)
        assert one.returncode == 0, err
        found.append(json.loads(out))
    assert [sums for step in zip(*(one["sums"] for one in found), strict=True) for sums in step] == wanted
    assert all(0 <= one["slots"][1] <= one["slots"][0] >= 2 for one in found)
    decoded = [one["decoded"] for one in found]
    assert sum(decoded) == RECORDS + 32  # each record once, and the padding
    assert (
        sum(count > 0 for count in decoded) == {"all": 4, "single": 2, "multi": 3}[design.partition("_")[0]]
    )


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
