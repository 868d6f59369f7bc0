"""One training program that uses most features of a run, on a mesh and on ranks alike.

`mpirun -n 4 python whole_run.py OUT.pkl` runs it on ranks; both share `train`. Results are per rank: a list
over ranks of `{name: array}`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.oracle.layout import Grid, spread

import commplan
import commplan.optax
from commplan.pytree import flatten

PLAN = """
plan whole
ensemble member = 2
axis data = ?
source images : u8[6]
source labels : i32
fn decode(u8[6]) -> u8[6] on host
fn noisy (u8[6]) -> u8[6] on host random
fn jitter(u8[6]) -> f32[6] on device random
fn shake (tree) -> tree on device random
input params : tree per member, data
input grads  : tree per member partial data
input loss   : f32 per member, data
state center : tree per member
state shard  : tree per member split data
state steps  : i32

at start {
    center = broadcast params over data from 1
    shard  = slice center over data
    steps  = map add(first)
    output center
}
input first : i32
each step {
    x, n  = load images batch 8 split data visit exactly_once seed 3
    x     = map decode(x)
    x     = share x over member via all_shared
    batch = map noisy(x) per member
    scaled = map jitter(batch) per member
    y     = load labels batch 4 split data per member visit at_least_once seed 5
    output batch, scaled, y, n
    own    = scatter grads over data by mean
    shard  = map pull(shard, own)
    center = gather shard over data
    noise  = map shake(center) per member
    loss   = reduce loss over data by mean
    output center, noise, loss
}
fn pull(tree, tree) -> tree on device elementwise
every 2 steps {
    reset = reduce grads over data by mean
    steps = map add(steps)
    output reset
}
fn add(i32) -> i32 on device
phase evaluate {
    worst = reduce loss over data by max
    best  = reduce worst across member by min
    output worst, best
}
"""
REDUCING = """
plan reducing
axis data = ?
input grads : tree partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
TREE = {"b": np.arange(3, dtype=np.float32), "w": np.ones((2, 6), np.float32)}
RECORDS = np.arange(20 * 6, dtype=np.uint8).reshape(20, 6)
LABELS = np.arange(9, dtype=np.int32)


def functions(decoded: list[int]) -> dict[str, Any]:
    def decode(record: Any) -> Any:
        decoded.append(int(record[0]))
        return record

    def noisy(x: Any, rng: np.random.Generator) -> Any:
        return x + rng.integers(0, 9, x.shape, np.uint8)

    def jitter(key: Any, x: Any) -> Any:
        return x.astype(jnp.float32) + jax.random.normal(key, x.shape)

    def shake(key: Any, tree: Any) -> Any:
        return jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), tree)

    def pull(shard: Any, member: Any) -> Any:
        return jax.tree.map(lambda s, g: s - 0.1 * g, shard, member)

    def add(steps: Any) -> Any:
        return steps + 1

    return {"decode": decode, "noisy": noisy, "jitter": jitter, "shake": shake, "pull": pull, "add": add}


def bind(where: Any, axes: dict[str, int] | None = None) -> tuple[Any, list[int]]:
    trees: dict[str, Any] = dict.fromkeys(("params", "grads", "center", "shard", "noise"), TREE)
    program = commplan.loads(PLAN).compile(where, shapes=trees, axes=axes)
    decoded: list[int] = []
    sources = {"images": RECORDS, "labels": LABELS}
    return program.bind(where, sources=sources, functions=functions(decoded), seed=11), decoded


def train(run: Any, params: Any, first: Any, gathered: Any) -> dict[str, Any]:
    """Two epochs; everything that comes out, by name. `own(name, tree)` makes host arrays of a value."""
    results: dict[str, Any] = {}

    def keep(step: int, **trees: Any) -> None:
        for name, tree in trees.items():
            results[f"{step} {name}"] = gathered(name, tree)

    out, state = run.start(run.init(), params=params, first=first)
    keep(0, center=out.center)

    @jax.jit
    @run.spmd(params="center", x="batch", scaled="scaled", returns=("center", "noise", "loss"))
    def step(state: Any, params: Any, x: Any, scaled: Any) -> Any:
        def loss(p: Any) -> Any:
            return ((x * p["w"][0] + scaled) ** 2).mean() + (p["b"] ** 2).sum()

        value, grads = jax.value_and_grad(loss)(run.varying(params))
        out, state = run.step(state, grads=grads, loss=value)
        return state, out.center, out.noise, out.loss

    @jax.jit
    @run.spmd(params="center", returns=("reset", "worst", "best"))
    def second(state: Any, params: Any) -> Any:
        grads = jax.grad(lambda p: (p["w"] ** 3).sum() + p["b"].sum())(run.varying(params))
        out, state = run.every[2](state, grads=grads)
        tested, state = run.evaluate(state, loss=out.reset["w"].sum())
        return state, out.reset, tested.worst, tested.best

    params, number = out.center, 0
    with run.batches() as batches:
        for _ in range(2):
            for item in batches:
                number += 1
                state, params, noise, loss = step(state, params, item["batch"], item["scaled"])
                keep(number, center=params, noise=noise, loss=loss)
                keep(number, batch=item["batch"], scaled=item["scaled"], y=item["y"], n=item["n"])
                if number % 2 == 0:
                    state, reset, worst, best = second(state, params)
                    keep(number, reset=reset, worst=worst, best=best)
        results["state of batches"] = batches.state()
    for name in ("center", "shard", "steps"):
        keep(number, **{name: state[name]})
    return results


def reduced(where: Any, axes: dict[str, int] | None = None) -> tuple[Any, Any, Any]:
    """A run of `REDUCING`, with optax's way and a tap on layers under scan."""
    layers = {"w": np.linspace(-1, 1, 3 * 4 * 4, dtype=np.float32).reshape(3, 4, 4)}
    program = commplan.loads(REDUCING).compile(where, shapes={"grads": layers}, axes=axes)
    run = program.bind(where)
    optimizer = optax.chain(commplan.optax.reduce(run, "grads"), optax.sgd(0.5))

    def network(layers: Any, x: Any, tap: Any) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return jnp.tanh(x @ tap(layer)["w"]), None

        return (jax.lax.scan(body, x, layers)[0] ** 2).mean()

    @jax.jit
    @run.spmd(params="same", x="split data", returns=("same", "same"))
    def both(state: Any, params: Any, x: Any) -> Any:
        grads = jax.grad(network)(run.varying(params), run.varying(x), lambda layer: layer)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        tapped = jax.grad(network)(params, run.varying(x), run.tap)
        return state, optax.apply_updates(params, updates), tapped

    return run, both, layers


class Parts:
    """Conversion of global arrays to the parts of each rank."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.grid = Grid(run.program.schedule)

    def own(self, name: str, tree: Any) -> list[Any]:
        """A list over ranks."""
        value = self.run.context.schedule.named[name]
        pairs, rebuild = flatten(tree)
        buffers = spread(self.grid, value, [np.asarray(leaf) for _, leaf in pairs])
        return [rebuild(list(buffers[rank])) for rank in self.grid.ranks]


def beginning(rank: int) -> Any:
    """The parameters that a rank begins with: others on each."""
    return jax.tree.map(lambda x: x + np.float32(rank), TREE)


def main(out: str) -> None:
    from mpi4py import MPI  # noqa: PLC0415  the tests on a mesh do without

    comm = MPI.COMM_WORLD
    run, decoded = bind(comm)
    results = train(run, beginning(comm.rank), np.int32(5), lambda name, tree: jax.tree.map(np.asarray, tree))
    results["decoded"] = sorted(decoded)
    results["place"] = run.place
    flat = comm.Dup()
    _, both, layers = reduced(flat)
    x = np.linspace(-2, 2, 2 * comm.size * 4, dtype=np.float32).reshape(comm.size, 2, 4)
    _, updated, tapped = both({}, layers, x[comm.rank])
    results |= {"updated": np.asarray(updated["w"]), "tapped": np.asarray(tapped["w"])}
    member = run.member(run.place["member"])
    with member.batches() as batches:
        results["member batch"] = np.asarray(next(iter(batches))["batch"])
    params = {"w": np.full((2, 6), comm.rank, np.float32), "b": np.zeros(3, np.float32)}
    params_of_member = member.take("params", params)
    started, _ = member.start(member.init(), params=params_of_member, first=np.int32(0))
    center = run.join("center", {member.index: started.center})
    results["member params"] = np.asarray(center["w"])
    every = comm.gather(results)
    if comm.rank == 0:
        Path(out).write_bytes(pickle.dumps(every))


if __name__ == "__main__":
    main(sys.argv[1])
