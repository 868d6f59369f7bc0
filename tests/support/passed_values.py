"""What phases make of the kinds of values that programs pass, on a mesh and on ranks alike.

`mpirun -n 2 python passed_values.py OUT.pkl` runs it on ranks: rank 0 writes what it found.
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
    """What a run on `where` gives, by case."""
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
    for name, given in NUMBERS.items():
        step = numbers(*given)
        results[name] = found(lambda step=step: step({})[1:])
        results[f"{name}, jit"] = found(lambda step=step: jax.jit(step)({})[1:])
    results["reduced twice"] = found(lambda: jax.jit(twice(lambda x: x))({}, rows)[1])
    results["reduced twice, alone"] = found(lambda: twice(lambda x: x)({}, rows)[1])
    results["reduced twice, negated"] = found(lambda: jax.jit(twice(lambda x: -x))({}, rows)[1])
    return results


if __name__ == "__main__":
    from mpi4py import MPI

    own = outcomes(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        Path(sys.argv[1]).write_bytes(pickle.dumps(own))
