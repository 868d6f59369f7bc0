"""One of the processes of `test_run_processes`: python two_processes.py PORT INDEX COUNT WHAT OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType

import commplan
import commplan.orbax
from commplan.diagnostics import CommplanError

PLAN = """plan two
ensemble member = 2
axis data = 2
source images : u8[6]
fn decode(u8[6]) -> u8[6] on host
fn noisy (u8[6]) -> u8[6] on host random
input params : tree per member, data
input grads  : tree per member partial data
input loss   : f32 per member, data
state center : tree per member
at start {
    center = broadcast params over data from 0
    output center
}
each step {
    x, n  = load images batch 4 split data visit exactly_once seed 3
    x     = map decode(x)
    x     = share x over member via all_shared
    batch = map noisy(x) per member
    output batch
    grads  = reduce grads over data by mean
    center = broadcast grads_each over data from 1
    loss   = reduce loss over data by mean
    best   = reduce loss across member by min
    output grads, best
}
input grads_each : tree per member, data
"""
REDUCE = """plan p
axis data = 2
input x : f32[2] partial data
each step {
    y = reduce x over data by sum
    output y
}
"""
PACED = """plan paced
ensemble member = 2
axis data = 2
source images : u8[6]
fn decode(u8[6]) -> u8[6] on host
each step {{
    x, n = load images batch {batch} split data visit exactly_once seed 3
    x    = map decode(x)
    output x, n
}}
"""
TREES = ("params", "grads", "grads_each", "center")
TREE = {"w": np.zeros((6,), np.float32)}
RECORDS = np.arange(10 * 6, dtype=np.uint8).reshape(10, 6)


def noisy(x, rng):
    return x + rng.integers(0, 9, x.shape, np.uint8)


def bound(mesh, decode):
    program = commplan.loads(PLAN).compile(mesh, shapes=dict.fromkeys(TREES, TREE))
    return program.bind(mesh, sources={"images": RECORDS}, functions={"decode": decode, "noisy": noisy})


def train(mesh, place: Path | None = None) -> dict[str, np.ndarray]:
    """Two epochs of steps; returns this process's part of the results, by name.

    `place`: the folder of a checkpoint, which is restored at once.
    """
    decoded = []

    def decode(record):
        decoded.append(int(record[0]))
        return record

    run = bound(mesh, decode)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("member", "data"))
    run.start(run.init(), params={"w": np.full((2, 2, 6), np.nan, np.float32)})  # arrays of the host
    params = {"w": np.arange(24, dtype=np.float32).reshape(2, 2, 6)}
    params = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at]), params)
    out, state = run.start(run.init(), params=params)

    @jax.jit
    @run.spmd(params="center", x="batch", returns=("params", "same", "per member split data"))
    def step(state, params, x):
        def loss(p):
            return ((x * p["w"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(run.varying(params))
        out, state = run.step(state, grads=grads, grads_each=grads, loss=value)
        return state, out.grads, out.best, x

    results: dict[str, list[np.ndarray]] = {"grads": [], "best": [], "batch": []}
    with run.batches() as batches:
        for _ in range(2):
            for item in batches:
                state, grads, best, batch = step(state, out.center, item["batch"])
                for name, value in (("grads", grads["w"]), ("best", best), ("batch", batch)):
                    results[name].append(local(value))
        if place is not None:
            keep(run, state, batches, place)
    results["center"] = [local(state["center"]["w"])]
    return {name: np.stack(arrays) for name, arrays in results.items()} | {"decoded": np.array(decoded)}


def keep(run, state, batches, place: Path) -> None:
    """Every process saves its state, and restores it."""
    checkpoint = commplan.orbax.Checkpoint(run)
    with ocp.Checkpointer(commplan.orbax.PlanCheckpointHandler()) as checkpointer:
        checkpointer.save(place, args=checkpoint.save(state, batches=batches))
        restored = checkpointer.restore(place, args=checkpoint.restore())
    assert restored["batches"] == batches.state()
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored["state"]), strict=True):
        assert after.sharding == before.sharding
        np.testing.assert_array_equal(local(after), local(before))


def local(array) -> np.ndarray:
    """The rows of an array that this process holds, copies left out."""
    pieces = {str(shard.index): shard for shard in array.addressable_shards}
    ordered = sorted(pieces.values(), key=lambda shard: [at.start or 0 for at in shard.index])
    if not array.ndim:
        return np.asarray(ordered[0].data)
    rows: dict[int, list[np.ndarray]] = {}
    for shard in ordered:
        rows.setdefault(shard.index[0].start or 0, []).append(np.asarray(shard.data))
    return np.concatenate([np.concatenate(row, axis=min(1, array.ndim - 1)) for row in rows.values()])


def trained(mesh, place: Path) -> None:
    np.savez(place, **train(mesh, place.parent / "checkpoint"))


def apart(mesh, place: Path) -> None:
    """Both bind one program, then each its own; and at last a single one binds."""
    index = jax.process_index()
    program = commplan.loads(REDUCE).compile(mesh)
    program.bind(mesh)
    mine = commplan.loads(REDUCE.replace("sum", ("sum", "mean")[index])).compile(mesh)
    report = {"different": refused(lambda: mine.bind(mesh))}
    report["seeds"] = refused(lambda: program.bind(mesh, seed=7 + index))
    swapped = jax.sharding.Mesh(mesh.devices[:: 1 - 2 * index], mesh.axis_names, axis_types=mesh.axis_types)
    report["meshes"] = refused(lambda: program.bind(swapped))
    renamed = jax.sharding.Mesh(mesh.devices, ("member", ("data", "model")[index]))
    report["axes"] = refused(lambda: program.bind(renamed))
    report["unknown"] = refused(lambda: program.bind(mesh, sources={"s": RECORDS} if index else {}))
    if index == 0:
        report["alone"] = refused(lambda: program.bind(mesh, timeout=2.0))
    place.with_suffix(".json").write_text(json.dumps(report))


def opened(mesh, place: Path) -> None:
    """Both bind, and only process 0 opens the batches that they share."""
    program = commplan.loads(PLAN).compile(mesh, shapes=dict.fromkeys(TREES, TREE))
    run = program.bind(mesh, sources={"images": RECORDS}, functions={"decode": list, "noisy": noisy})
    if jax.process_index() == 0:
        place.with_suffix(".json").write_text(json.dumps(refused(lambda: run.batches(timeout=2.0))))


def paced(mesh, place: Path, batch: str = "[2, 4] over member") -> None:
    """Each process takes the batches of its member, with an independent clock; returns the decoded
    records."""
    decoded, rows = [], 0

    def decode(record):
        decoded.append(int(record[0]))
        return record

    program = commplan.loads(PACED.format(batch=batch)).compile(mesh)
    run = program.bind(mesh, sources={"images": RECORDS[:8]}, functions={"decode": decode})
    with run.batches(member=jax.process_index()) as batches:
        rows = sum(len(batch["x"]) for batch in batches)
        place.with_suffix(".json").write_text(json.dumps({"decoded": decoded, "rows": rows}))


def members(mesh, place: Path) -> None:
    """The same with one clock for both."""
    paced(mesh, place, "2")


def refused(call) -> str:
    try:
        call()
    except CommplanError as error:
        return str(error)
    return "taken"


def main(port: str, index: str, count: str, case: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    mesh = jax.make_mesh((2, 2), ("member", "data"), (AxisType.Auto,) * 2)
    cases = {"trained": trained, "apart": apart, "opened": opened, "paced": paced, "members": members}
    cases[case](mesh, Path(out) / f"{index}.npz")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
