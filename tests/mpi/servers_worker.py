"""Run on every rank by test_servers.py: workers against servers, compared with NumPy.

    mpirun -n WORKERS+SERVERS python servers_worker.py CASE...

Every worker prints "CASE ok".
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commplan

comm = MPI.COMM_WORLD
RANK = comm.Get_rank()
EXCHANGE = """
plan exchange_at_servers
axis worker = ?
server hub = {servers}
input params : tree per worker
input grads : tree partial worker
state weights : tree on hub
state moment : tree on hub
fn zeros(tree) -> tree on device elementwise
fn sgd(tree, tree, tree) -> tree, tree on device elementwise
at start {{
    weights = broadcast params over worker from 0
    moment = map zeros(weights)
}}
each step {{
    weights, moment = exchange grads into weights, moment with sgd over worker by mean {{ chunk = 1 KiB }}
    {output}
}}
phase look {{
    output weights, moment
}}
"""
ELASTIC = """
plan elastic_at_servers
axis worker = ?
server master = {servers}
input params : tree per worker
input eta : f32
state center : tree on master
at start {{
    center = broadcast params over worker from 0
}}
each step {{
    pull, center = elastic params with center over worker by {mode}(eta = {eta}, rho = 0.5){hints}
    output pull
}}
phase look {{
    output center
}}
"""
TREE = {
    "bias": np.zeros((5,), np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scale": np.zeros((), np.float32),
    "table": np.zeros((33, 41), np.float32),
    "half": np.zeros((300,), np.float16),
}
Tree = dict[str, Any]


def values(*seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in TREE.items()}


def sgd(weights: Tree, moment: Tree, grads: Tree) -> tuple[Tree, Tree]:
    moment = jax.tree.map(lambda m, g: m * 0.5 + g, moment, grads)
    return jax.tree.map(lambda w, m: w - m * 0.25, weights, moment), moment


def zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x * 0, tree)


FUNCTIONS = {"sgd": sgd, "zeros": zeros}


def bound(text: str, servers: int) -> tuple[Any, int]:
    """The plan on all ranks, and the number of workers; servers serve, and answer None."""
    plan = commplan.loads(text)
    names = [value.name for value in plan.graph.values]
    shapes = {name: TREE for name in ("params", "grads", "weights", "moment", "center") if name in names}
    functions = {fn.name: FUNCTIONS[fn.name] for fn in plan.graph.fns}
    run = plan.compile(comm, shapes=shapes).bind(comm, functions=functions)
    served = run.serve()
    if run.role == "server":
        assert served.lost == (), served
        assert served.broken_off == {}, served
        return None, 0
    assert served is None
    return run, comm.Get_size() - servers


def same(actual: Any, expected: Tree) -> None:
    for name, x in expected.items():
        assert np.asarray(actual[name]).dtype == x.dtype, name
        np.testing.assert_array_equal(np.asarray(actual[name]), x, name)


def exchange(servers: int, output: str) -> None:
    run, workers = bound(EXCHANGE.format(servers=servers, output=output), servers)
    if run is None:
        return
    state = run.init()
    assert state == {}
    _, state = run.start(state, params=values(RANK))
    weights, moment = values(0), zeros(values(0))
    for step in range(4):
        out, state = run.step(state, grads=values(step, RANK))
        terms = [values(step, worker) for worker in range(workers)]
        grads = {n: sum((t[n] for t in terms[1:]), terms[0][n]) / TREE[n].dtype.type(workers) for n in TREE}
        weights, moment = sgd(weights, moment, grads)
        if output:
            same(out.weights, weights)
    comm_of_workers(run).Barrier()  # otherwise others may be ahead of this one, and of its view of the server
    out, state = run.look(state)
    same(out.weights, weights)
    same(out.moment, moment)
    run.close()


def comm_of_workers(run: Any) -> Any:
    return run.context.machine.comm


def elastic(mode: str, servers: int, eta: str = "0.25", hints: str = "", late: bool = False) -> None:
    text = ELASTIC.format(servers=servers, mode=mode, eta=eta, hints=hints)
    run, workers = bound(text if eta == "eta" else text.replace("input eta : f32\n", ""), servers)
    if run is None:
        return
    state = run.init()
    params = values(7, RANK)
    _, state = run.start(state, params=params)
    comm = comm_of_workers(run)
    everyone: list[Tree] = comm.allgather(params)
    expected, total = dict(everyone[0]), {n: np.zeros(x.shape, np.float64) for n, x in TREE.items()}
    # In memory that all of them see sums lose terms, unless workers take turns.
    alone = mode == "hogwild" and not hints
    for _ in range(3):
        more = {"eta": np.float32(0.25)} if eta == "eta" else {}
        for _ in range(RANK if alone else 0):
            comm.Barrier()
        out, state = run.step(state, params=params, **more)
        pull = jax.tree.map(np.asarray, out.pull)
        for _ in range(workers - RANK if alone else 0):
            comm.Barrier()
        params = {n: params[n] - pull[n] for n in TREE}
        for n in TREE:
            total[n] += pull[n]
        if alone or mode == "round_robin":
            for worker in range(workers):
                mine = everyone[worker]
                force = {n: (mine[n] - expected[n]) * x.dtype.type(0.125) for n, x in TREE.items()}
                expected = {n: expected[n] + force[n] for n in TREE}
                everyone[worker] = {n: mine[n] - force[n] for n in TREE}
                if worker == RANK:
                    same(pull, force)
    totals = comm.allgather(total)
    out, state = run.look(state)
    regions = run.context.machine.backend.service._regions or {}
    assert {state for offered in regions.values() for state in offered} == ({"center"} if alone else set())
    if alone or mode == "round_robin":
        same(out.center, expected)
    first = comm.bcast(values(7, RANK) if RANK == 0 else None)
    for n, x in TREE.items():
        moved = first[n] + sum(t[n] for t in totals)
        atol = 1e-5 if x.itemsize > 2 else 1e-2
        np.testing.assert_allclose(np.asarray(out.center[n]), moved, rtol=0, atol=atol)
    if not late:
        run.close()  # otherwise the garbage collector closes it, or the interpreter's exit


def roles() -> None:
    """Each rank receives the error for its role."""
    text = ELASTIC.format(servers=1, mode="async", eta="eta", hints="")
    run = commplan.loads(text).compile(comm, shapes={"params": TREE, "center": TREE}).bind(comm)
    if run.role == "server":
        refused("CP0853", lambda: run.step(run.init(), params=TREE, eta=0.5))
        run.close()
        assert run.serve().requests
        return
    state = run.init()
    refused("CP0812", lambda: run.start({"center": TREE}, params=TREE))
    _, state = run.start(state, params=values(RANK))
    run.close()
    run.close()
    refused("CP0832", lambda: run.step(state, params=values(RANK), eta=0.5))


def refused(code: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except commplan.CommplanError as error:
        assert error.diagnostics[0].code == code, error
    else:
        raise AssertionError(f"{code} was expected")


def collected() -> None:
    """A run that nothing refers to any more has left: the server ends, though the worker does not."""
    elastic("async", 1, late=True)
    gc.collect()


CASES: dict[str, Callable[[], None]] = {
    "exchange": lambda: exchange(2, "output weights"),
    "central": lambda: exchange(1, "output weights"),
    "silent": lambda: exchange(2, ""),
    "round_robin": lambda: elastic("round_robin", 2),
    "async": lambda: elastic("async", 1, "eta"),
    "hogwild": lambda: elastic("hogwild", 2),
    "mapped": lambda: elastic("hogwild", 1, "eta"),
    "messages": lambda: elastic("hogwild", 1, hints=" { staleness = 1 }"),
    "roles": roles,
    "collected": collected,
    "left_open": lambda: elastic("async", 2, late=True),
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CASES[name]()
        print(name, "ok", flush=True)
