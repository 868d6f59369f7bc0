"""The results of phases for the kinds of values that programs pass, on a mesh and on ranks alike.

`mpirun -n 2 python passed_values.py OUT.pkl` runs it on ranks: rank 0 writes the results.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import commplan
from commplan.diagnostics import CommplanError
from commplan.pytree import is_key_type

RANKS = 2
PLAN = """plan values
axis data = 2
input loss  : f32 per data
input count : i32 per data
input t     : tree partial data
each step {
    loss  = reduce loss over data by mean
    count = reduce count over data by sum
    t     = reduce t over data by sum
    output loss, count, t
}
phase again {
    t = reduce t over data by sum
    output t
}
"""
MOVES = """plan moves
axis data = 2
input mine  : tree per data
input pairs : tree per data
state held : tree
at start {
    held  = broadcast mine over data from 1
}
each step {
    first = broadcast mine over data from 0
    cut   = slice first over data
    whole = gather cut over data
    next  = shift mine over data by 1
    other = swap pairs over data
    held  = broadcast mine over data from 1
    output first, whole, next, other, held
}
"""
MOVED = ("int8", "int16", "uint16", "uint32", "uint8", "int32", "bool", "key")
TREE = {"s": jnp.float32(1), "one": jnp.ones(1), "i": jnp.int32(2)}
SHAPES = {"t": TREE}
F32, I32 = jnp.float32, jnp.int32
NUMBERS = {  # of one call: loss, count, t
    "arrays": (F32(2), I32(3), TREE),
    "python numbers": (2.0, 3, {"s": 1.0, "one": jnp.ones(1), "i": 2}),
    "an int for f32": (2, 3, {"s": 1, "one": np.ones(1, np.float32), "i": 2}),
    "numpy scalars": (np.float32(2), np.int32(3), {"s": np.float32(1), "one": np.ones(1), "i": np.int64(2)}),
    "wide numpy scalars": (np.float64(2), np.int64(3), TREE),
    "weak types": (jnp.asarray(2.0) * 1, jnp.asarray(3), TREE),
    "a bool for i32": (F32(2), True, TREE),
    "a float for i32": (F32(2), 3.0, TREE),
    "too large": (F32(2), 2**40, TREE),
    "a list": (F32(2), 3, {"s": 1.0, "one": [1.0], "i": 2}),
    "a dimension": (jnp.ones(1), 3, TREE),
    "bf16": (jnp.bfloat16(2), 3, TREE),
    "a text": ("2", 3, TREE),
}


def found(call: Callable[[], Any]) -> Any:
    """The arrays that `call` gives, or the first words of its error."""
    try:
        return jax.tree.map(lambda x: (np.asarray(x).tolist(), str(x.dtype)), call())
    except CommplanError as error:
        return str(error)


def outcomes(where: Any) -> dict[str, Any]:
    """The results of a run on `where`, by case."""
    run = commplan.loads(PLAN).compile(where, shapes=SHAPES).bind(where)

    def numbers(loss: Any, count: Any, tree: Any) -> Any:
        def step(state: Any) -> Any:
            out, state = run.step(state, loss=loss, count=count, t=tree)
            return state, out.loss, out.count, out.t

        return run.spmd(returns=("loss", "count", "t"))(step)

    def twice(how: Callable[[Any], Any]) -> Any:
        def step(state: Any, x: Any) -> Any:
            out, state = run.again(state, t={**TREE, "s": x.sum()})
            out, state = run.step(state, loss=x.sum(), count=3, t=jax.tree.map(how, out.t))
            return state, out.t

        return run.spmd(x="split data", returns="t")(step)

    rows = np.ones((2 if run.place else 4, 3), np.float32)
    results: dict[str, Any] = {}
    for name, value in NUMBERS.items():
        step = numbers(*value)
        results[name] = found(lambda step=step: step({})[1:])
        results[f"{name}, jit"] = found(lambda step=step: jax.jit(step)({})[1:])
    results["reduced twice"] = found(lambda: jax.jit(twice(lambda x: x))({}, rows)[1])
    results["reduced twice, alone"] = found(lambda: twice(lambda x: x)({}, rows)[1])
    results["reduced twice, negated"] = found(lambda: jax.jit(twice(lambda x: -x))({}, rows)[1])
    return results


def leaves_of(rank: int) -> dict[str, Any]:
    """A tree with leaves of every type that is moved, another on each rank."""
    draw = np.random.default_rng(rank)
    tree: dict[str, Any] = {
        name: draw.integers(0, 2 if name == "bool" else 100, (3,)).astype(name) for name in MOVED[:-1]
    }
    return tree | {"key": jax.random.key(rank), "keys": jax.random.split(jax.random.key(rank + 5), 2)}


def data(tree: Any) -> Any:
    """`tree` with keys as their words, in NumPy."""

    def plain(x: Any) -> Any:
        is_key = is_key_type(x.dtype)
        return (str(x.dtype), np.asarray(jax.random.key_data(x) if is_key else x).tolist())

    return jax.tree.map(plain, tree)


def pairs_of(tree: Any) -> Any:
    """The leaves of `tree`, twice each: blocks for two ranks."""
    return {name: np.stack([x, x[::-1]]) for name, x in tree.items() if not name.startswith("key")}


def moves(where: Any, mine: Any, pairs: Any) -> dict[str, Any]:
    """The result of each verb that moves data, for `mine`: that of this rank, or of all in a leading
    dimension."""
    leaves = leaves_of(0)
    shapes = {"mine": leaves, "held": leaves, "pairs": pairs_of(leaves)}
    run = commplan.loads(MOVES).compile(where, shapes=shapes).bind(where)
    begun = run.init()
    _, state = run.start(begun, mine=mine)
    out, after = run.step(state, mine=mine, pairs=pairs)
    step = run.spmd(mine="per data", pairs="per data", returns=("first", "whole", "next", "other"))

    def alone(state: Any, mine: Any, pairs: Any) -> Any:
        out, state = run.step(state, mine=mine, pairs=pairs)
        return state, out.first, out.whole, out.next, out.other

    _, *jitted = jax.jit(step(alone))(state, mine, pairs)
    moved = {name: data(out[name]) for name in out}
    moved |= {
        f"{name}, jit": data(tree)
        for name, tree in zip(("first", "whole", "next", "other"), jitted, strict=True)
    }
    return moved | {"init": data(begun["held"]), "state": data(state["held"]), "after": data(after["held"])}


if __name__ == "__main__":
    from mpi4py import MPI

    tree = leaves_of(MPI.COMM_WORLD.rank)
    own = outcomes(MPI.COMM_WORLD), moves(MPI.COMM_WORLD, tree, pairs_of(tree))
    every = MPI.COMM_WORLD.gather(own)
    if every is not None:
        Path(sys.argv[1]).write_bytes(pickle.dumps(every))
