"""Training steps twice: through a plan, and written by hand as an expert would; both as compiled HLO.

Run as a program it writes the HLO of one pair: `python twins.py NAME DIRECTORY`; it needs as many
devices as the plan has ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import encode
from commplan.lowering.jax.primitives import assume_same

PLANS = Path(__file__).parents[2] / "examples" / "plans"
Tree = Any


class Pair(NamedTuple):
    """The schedule of a plan, and the HLO of a step that goes through it and of its twin."""

    schedule: Schedule
    planned: str
    by_hand: str


# Three buckets of float32 and one of bfloat16 under a limit of 20 KiB, last leaf first.
MIXED = {
    "a": {"b": ((64,), "float32"), "w": ((64, 64), "float32")},
    "b": {"b": ((64,), "float32"), "w": ((64, 64), "bfloat16")},
    "c": {"b": ((64,), "float32"), "w": ((64, 64), "float32")},
    "d": {"b": ((32,), "float32"), "w": ((64, 32), "float32")},
    "e": {"b": ((32,), "bfloat16"), "w": ((32, 32), "bfloat16")},
}
# Leaves as JAX flattens them: a/b a/w b/b b/w c/b c/w d/b d/w e/b e/w are 0..9.
MIXED_BUCKETS = ((7, 6), (9, 8, 3), (5, 4, 2), (1, 0))

# One dtype, and sizes that eight does not divide: a/b a/w b/b b/w c/b c/w are 0..5.
PLAIN = {
    "a": {"b": ((67,), "float32"), "w": ((64, 67), "float32")},
    "b": {"b": ((33,), "float32"), "w": ((67, 33), "float32")},
    "c": {"b": ((16,), "float32"), "w": ((33, 16), "float32")},
}
PLAIN_BUCKETS = ((5, 4, 3, 2), (1, 0))
PLAIN_GATHERS = ((0, 1, 2), (3, 4, 5))


def leaves_like(shapes: Tree) -> Tree:
    """A tree of `((dims), dtype)` as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape[0], shape[1]), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def loss(params: Tree, x: Any) -> Any:
    """A little network: `params` maps layer names to {"w", "b"}, applied in order of the names."""
    for name in sorted(params):
        layer = params[name]
        x = jnp.tanh(x.astype(layer["w"].dtype) @ layer["w"] + layer["b"].astype(layer["w"].dtype))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def sgd(params: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda p, g: p - jnp.asarray(0.1, p.dtype) * g.astype(p.dtype), params, grads)


def hlo(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def mesh_of(devices: Any, **sizes: int) -> Any:
    """A mesh of the first devices; its `shape` is a cached property, which pyright takes for no mapping."""
    shape = tuple(sizes.values())
    count = int(np.prod(shape))
    array = np.array(devices).reshape(-1)[:count].reshape(shape)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def placed(mesh: Mesh, spec: Any, shapes: Tree) -> Tree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)


def plan(name: str, *changes: tuple[str, str]) -> commplan.Plan:
    """The plan of the examples called `name`, its text changed."""
    text = (PLANS / f"{name}.plan").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return commplan.loads(text, f"{name}.plan")


def bind(name: str, mesh: Mesh, shapes: Tree, *changes: tuple[str, str], **functions: Any) -> Any:
    """The plan of the examples called `name`, its text changed, compiled and bound to `mesh`."""
    return plan(name, *changes).compile(mesh, shapes=shapes).bind(mesh, functions=functions)


def after(x: Any, previous: Any, axis: str) -> Any:
    """`x`, but not before `previous`: a real dependency, which XLA:CPU does not drop as it does barriers."""
    if previous is None:
        return x
    return jnp.where(lax.axis_index(axis) < 0, previous.reshape(-1)[0].astype(x.dtype), x)


def vary(tree: Tree, axes: Sequence[str]) -> Tree:
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes), to="varying"), tree)


def pack(leaves: Sequence[Any], chosen: Sequence[int]) -> Any:
    return jnp.concatenate([leaves[i].reshape(-1) for i in chosen])


def unpack(flat: Any, like: Sequence[Any], chosen: Sequence[int], out: list[Any]) -> None:
    at = 0
    for i in chosen:
        out[i] = flat[at : at + like[i].size].reshape(like[i].shape)
        at += like[i].size


def data_parallel(devices: Any) -> Pair:
    """Buckets of at most 20 KiB, of two dtypes, in backward order."""

    def reduce(flat: Any, previous: Any) -> tuple[Any, Any]:
        total = lax.psum(after(flat, previous, "data"), "data")
        return total, total

    return _data_parallel(devices, reduce, 8, (", wire = bf16, accumulate = f32", ""))


def data_parallel_wire(devices: Any) -> Pair:
    """The same sent as bfloat16 (as its bits, or XLA:CPU widens it) and summed in float32."""

    def bits(x: Any) -> Any:
        return lax.bitcast_convert_type(x, jnp.uint16)

    def floats(x: Any) -> Any:
        return lax.bitcast_convert_type(x, jnp.bfloat16)

    def reduce(flat: Any, previous: Any) -> tuple[Any, Any]:
        sent = bits(after(flat.astype(jnp.bfloat16), previous, "data"))
        rows = floats(lax.all_to_all(sent, "data", 0, 0, tiled=True)).astype(jnp.float32)
        shard = (rows.reshape(8, -1).sum(0) / 8).astype(jnp.bfloat16)
        whole = floats(lax.all_gather(bits(shard), "data", tiled=True, to="invarying"))
        return whole.astype(flat.dtype), whole

    return _data_parallel(devices, reduce, 1)


def _data_parallel(
    devices: Any, reduce: Callable[[Any, Any], tuple[Any, Any]], divisor: int, *changes: tuple[str, str]
) -> Pair:
    mesh = mesh_of(devices, data=8)
    params = leaves_like(MIXED)
    shapes = {"params": params, "grads": params}
    run = bind("data_parallel", mesh, shapes, ("bucket = 25 MiB", "bucket = 20 KiB"), *changes)

    @run.spmd(params="same", x="split data")
    def planned(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        return state, sgd(params, out.grads)

    def by_hand(params: Tree, x: Any) -> Tree:
        grads = jax.grad(loss)(vary(params, ["data"]), x)
        leaves, tree = jax.tree.flatten(grads)
        out, previous = list(leaves), None
        for chosen in MIXED_BUCKETS:
            total, previous = reduce(pack(leaves, chosen), previous)
            unpack(total, leaves, chosen, out)
        return sgd(params, jax.tree.unflatten(tree, [g / jnp.asarray(divisor, g.dtype) for g in out]))

    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    where = placed(mesh, P(), params)
    return Pair(run.program.schedule, hlo(planned, {}, where, x), hlo(mapped, where, x))


def two_level(devices: Any) -> Pair:
    """Reduce-scatter in the node, all-reduce between nodes, all-gather in the node; padded to eight. The
    second bucket is scattered before the first is gathered."""
    mesh = mesh_of(devices, node=4, gpu=8)
    params = leaves_like(PLAIN)
    run = bind("two_level", mesh, {"grads": params}, ("bucket = 64 MiB", "bucket = 20 KiB"))

    @run.spmd(params="same", x="split node, gpu")
    def planned(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        return state, sgd(params, out.grads)

    def gather_behind(shard: Any, previous: Any) -> Any:
        return lax.all_gather(after(shard, previous, "gpu"), "gpu", tiled=True, to="invarying")

    def by_hand(params: Tree, x: Any) -> Tree:
        grads = jax.grad(loss)(vary(params, ["node", "gpu"]), x)
        leaves, tree = jax.tree.flatten(grads)
        out = list(leaves)
        flats = [pack(leaves, chosen) for chosen in PLAIN_BUCKETS]
        first, second = (jnp.concatenate([flat, jnp.zeros(-flat.size % 8, flat.dtype)]) for flat in flats)
        first = lax.psum_scatter(first, "gpu", tiled=True)
        second = lax.psum_scatter(after(second, first, "gpu"), "gpu", tiled=True)
        total = lax.psum(first, "node")
        behind = assume_same(after(total, second, "gpu"), ["node"])  # nothing of `second` is chosen
        gathered = lax.all_gather(behind, "gpu", tiled=True, to="invarying")
        second = lax.psum(after(second, total, "node"), "node")
        for chosen, flat in zip(PLAIN_BUCKETS, (gathered, gather_behind(second, gathered)), strict=True):
            unpack(flat, leaves, chosen, out)
        return sgd(params, jax.tree.unflatten(tree, [g / 32 for g in out]))

    spec = P(("node", "gpu"))
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spec))
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), spec), out_specs=P())
    where = placed(mesh, P(), params)
    return Pair(run.program.schedule, hlo(planned, {}, where, x), hlo(mapped, where, x))


def momentum(params: Tree, grads: Tree, moment: Tree) -> tuple[Tree, Tree]:
    """One step on a shard: an elementwise optimizer with one state."""
    moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moment), moment


def sharded_update(devices: Any) -> Pair:
    """Gradients reduce-scattered by buckets, the optimizer on one shard, parameters gathered by buckets."""
    mesh = mesh_of(devices, data=8)
    params = leaves_like(PLAIN)
    run = bind(
        "sharded_update", mesh, {"params": params, "grads": params, "adam": params},
        ("by mean", "by mean { bucket = 20 KiB }"),
        ("gather shard over data", "gather shard over data { bucket = 2560 }"),
        adam_init=lambda shard: shard, adam_update=momentum,
    )  # fmt: skip

    @run.spmd(params="same", x="split data")
    def planned(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), x)
        out, state = run.step(state, params=params, grads=grads)
        return state, out.params

    def shard_of(leaf: Any) -> Any:
        flat = _padded(leaf.reshape(-1))
        return lax.dynamic_slice_in_dim(flat, lax.axis_index("data") * (flat.size // 8), flat.size // 8)

    def by_hand(moment: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(vary(params, ["data"]), x)
        leaves, tree = jax.tree.flatten(grads)
        shards, previous = list(leaves), None
        for chosen in PLAIN_BUCKETS:
            rows = [_padded(leaves[i].reshape(-1)).reshape(8, -1) for i in chosen]
            flat = jnp.concatenate(rows, axis=1).reshape(-1)
            previous = lax.psum_scatter(after(flat, previous, "data"), "data", tiled=True)
            unpack(previous, [row[0] for row in rows], range(len(rows)), mine := list(rows))
            for i, shard in zip(chosen, mine, strict=True):
                shards[i] = shard / 8
        pieces = jax.tree.map(shard_of, params)
        pieces, moment = momentum(pieces, jax.tree.unflatten(tree, shards), moment)
        local, out = jax.tree.leaves(pieces), list(leaves)
        for chosen in PLAIN_GATHERS:
            shard = after(pack(local, chosen), previous, "data")
            previous = lax.all_gather(shard, "data", tiled=True, to="invarying")
            table, at = previous.reshape(8, -1), 0
            for i in chosen:
                part = table[:, at : at + local[i].size].reshape(-1)
                out[i] = part[: leaves[i].size].reshape(leaves[i].shape)
                at += local[i].size
        return moment, jax.tree.unflatten(tree, out)

    sharded, batch = P("data"), P("data")
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, batch))
    flat = jax.tree.map(lambda s: jax.ShapeDtypeStruct((-(-s.size // 8) * 8,), s.dtype), params)
    where, moment = placed(mesh, P(), params), placed(mesh, sharded, flat)
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(sharded, P(), batch), out_specs=(sharded, P()))
    return Pair(run.program.schedule, hlo(planned, {"adam": moment}, where, x), hlo(mapped, moment, where, x))


def _padded(flat: Any) -> Any:
    return jnp.pad(flat, (0, -flat.size % 8)) if flat.size % 8 else flat


PAIRS: dict[str, Callable[[Any], Pair]] = {
    one.__name__: one for one in (data_parallel, data_parallel_wire, two_level, sharded_update)
}


def main(name: str, directory: str) -> None:
    pair = PAIRS[name](jax.devices())
    out = Path(directory)
    (out / "schedule.json").write_bytes(encode(pair.schedule))
    (out / "planned.hlo").write_text(pair.planned)
    (out / "by_hand.hlo").write_text(pair.by_hand)


if __name__ == "__main__":
    main(*sys.argv[1:])
