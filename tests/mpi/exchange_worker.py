"""Exchanges between ranks against the equations: `mpirun -n N python exchange_worker.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI
from support.exchanges import SHAPES, counts, drawn, momentum, plain, plan_text, same, wanted, zeros

import commplan

PIECES = "share,rates,place,bucket{max=64},fuse_update,decompose,wire,select,overlap"
NARROW = "{ wire = bf16, accumulate = f32 }"
TREE = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}


def check(
    comm: Any, axes: Mapping[str, int], by: str, states: int, via: str, options: str, passes: Any
) -> None:
    """Three steps, bit by bit."""
    text = plan_text(axes, via, options, by, states)
    program = commplan.loads(text).compile(comm, shapes={"params": TREE, "grads": TREE}, passes=passes)
    functions: Any = {"zeros": zeros, "update": momentum} if states == 2 else {"update": plain}
    run: Any = program.bind(comm, functions=functions)
    lead, rank = (comm.Get_size(),), comm.Get_rank()

    @jax.jit
    def step(state: Any, arguments: Any) -> Any:
        return run.step(state, **arguments)

    def own(tree: Any) -> Any:
        return {key: leaf[rank] for key, leaf in tree.items()}

    right = wanted({"all": comm.Get_size()}, 3, by, states)
    out, state = run.start(run.init(), params=own(drawn(0, lead)))
    history = [out.weights]
    for number in (1, 2, 3):
        arguments = {"grads": own(drawn(number, lead))}
        arguments |= {"n": counts(number, lead)[rank]} if "weight" in by else {}
        out, state = step(state, arguments)
        history.append(out.weights)
    assert all(map(same, history, right)), (rank, axes, by, via, options)
    if states == 2 and via == "via parameter_server":
        ranks = comm.Get_size()
        sizes = {key: leaf.size for key, leaf in state["moment"].items()}
        assert sizes == {"a": -(-15 // ranks), "b": -(-7 // ranks), "c": -(-4 // ranks), "scale": 1}, sizes


def main() -> None:
    comm = MPI.COMM_WORLD
    flat, racks = {"worker": comm.Get_size()}, {"rack": comm.Get_size(), "worker": 1}
    check(comm, flat, "sum", 2, "via parameter_server", "{ overlap = backward }", PIECES)
    check(comm, flat, "mean(weight = n)", 2, "via parameter_server", NARROW, PIECES)
    check(comm, flat, "sum", 1, "", "", None)
    check(comm, flat, "sum", 2, "via parameter_server(owners = 1)", "{ chunk = 16 }", PIECES)
    check(comm, flat, "mean(weight = n)", 2, "via parameter_server(owners = 2)", "", None)
    check(comm, racks, "sum", 2, "via parameter_server(within = rack)", "{ chunk = 16 }", PIECES)


if __name__ == "__main__":
    main()
