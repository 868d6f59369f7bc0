"""The operations of phases hang on one another, or this raises: `mpirun -n 2 python order_ranks.py`."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commplan

PLAN = """plan p
axis data = ?
input x : f32[8] partial data
input y : f32[5] per data
each step {
    s = reduce x over data by sum
    m = reduce y over data by max
    output s, m
}
phase other {
    t = reduce y over data by min
    output t
}
"""


def tokens(jaxpr: Any) -> list[tuple[Any, Any]]:
    """The token operand and the token result of each operation."""
    pairs: list[tuple[Any, Any]] = []
    for eqn in jaxpr.eqns:
        if str(eqn.primitive).startswith("commplan_"):
            ins = [v for v in eqn.invars if str(v.aval) == "int32[1]"]
            outs = [v for v in eqn.outvars if str(v.aval) == "int32[1]"]
            pairs.append((ins[-1], outs[-1]))
    return pairs


def main() -> None:
    comm: Any = MPI.COMM_WORLD
    run = commplan.loads(PLAN).compile(comm).bind(comm)
    x, y = np.arange(8, dtype=np.float32), np.full(5, comm.rank, np.float32)

    def both(x: Any, y: Any) -> Any:
        first_result, _ = run.step({}, x=x, y=y)
        two, _ = run.other({}, y=y)  # takes nothing of the first
        three, _ = run.step({}, x=x, y=y)
        return first_result.s, two.t, three.m

    chain = tokens(jax.make_jaxpr(both)(x, y).jaxpr)
    assert len(chain) == 5, chain
    for (_, output), (operand, _) in itertools.pairwise(chain):
        assert output is operand, chain

    with jax.checking_leaks():  # tokens keep no trace alive
        s, t, m = jax.jit(both)(x, y)
    gc.collect()
    assert (np.asarray(s) == 2 * x).all()
    assert (np.asarray(t) == 0).all()
    assert (np.asarray(m) == comm.size - 1).all()

    def repeated(x: Any, y: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            out, _ = run.step({}, x=carry, y=y)
            return out.s / comm.size, out.m

        first, _ = run.other({}, y=y)
        last, many = jax.lax.scan(body, x + first.t.sum(), None, length=3)
        return last, many

    last, many = jax.jit(repeated)(x, y)
    assert np.allclose(last, x)
    assert many.shape == (3, 5)
    for _ in range(3):  # outside of jit
        out, _ = run.step({}, x=x, y=y)
        assert (np.asarray(out.s) == 2 * x).all()
    print("in order")


if __name__ == "__main__":
    main()
