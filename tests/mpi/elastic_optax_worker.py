"""Run on every rank by test_elastic_optax.py: elastic averaging as an optax transformation, against NumPy.

    mpirun -n 3 python elastic_optax_worker.py

Two workers and a server take turns (round_robin, every step); then the two workers keep the center among
themselves (sync, every second step), with momentum. Every rank prints "ok".
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from mpi4py import MPI

import commplan
import commplan.optax
from commplan import CommplanError

PLAN = """
plan easgd
axis worker = 2
{server}
input params : tree per worker
state center : tree {on}
at start {{
    center = broadcast params over worker from 0
}}
every {period} steps {{
    pull, center = elastic params with center over worker by {mode}(eta = 0.25, rho = 0.5)
    output pull
}}
"""
ETA, ALPHA, MU, STEPS = np.float32(0.25), np.float32(0.125), np.float32(0.5), 5
comm = MPI.COMM_WORLD
RANK = comm.Get_rank()


def begin(worker: int) -> dict[str, Any]:
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * worker, "b": np.float32(worker)}


def gradient(step: int, worker: int) -> dict[str, Any]:
    return {"w": np.full((2, 3), step - 4 * worker, np.float32), "b": np.float32(step + worker)}


def trained(run: Any, optimizer: Any, worker: int) -> Any:
    params = begin(worker)
    whole = optax.chain(optimizer, commplan.optax.elastic(run, "params"))
    opt = whole.init(params)

    @jax.jit
    @run.spmd(params="params", opt="params", grads="params")
    def step(state: Any, params: Any, opt: Any, grads: Any) -> Any:
        updates, opt = whole.update(grads, opt, params)
        return state, optax.apply_updates(params, updates), opt

    state = run.init()
    for number in range(STEPS):
        state, params, opt = step(state, params, opt, gradient(number, worker))
    return params


def expected(period: int, mu: Any, *, at_once: bool) -> list[Any]:
    """Both workers' parameters by the equations."""
    both, center = [begin(0), begin(1)], begin(0)
    moments = [{name: np.zeros_like(x) for name, x in params.items()} for params in both]
    for number in range(STEPS):
        pulls: list[Any] = []
        for worker in range(2):
            pull = {name: ALPHA * (x - center[name]) for name, x in both[worker].items()}
            pulls.append(pull if number % period == 0 else {name: 0 * x for name, x in pull.items()})
            if not at_once:
                center = {name: x + pulls[-1][name] for name, x in center.items()}
        if at_once:
            center = {name: x + (pulls[0][name] + pulls[1][name]) for name, x in center.items()}
        for worker in range(2):
            grads = gradient(number, worker)
            moments[worker] = {name: mu * v + grads[name] for name, v in moments[worker].items()}
            both[worker] = {
                name: x - ETA * moments[worker][name] - pulls[worker][name]
                for name, x in both[worker].items()
            }
    return both


def check(actual: Any, target: Any) -> None:
    for name, x in target.items():
        np.testing.assert_allclose(np.asarray(actual[name]), x, rtol=1e-6)


def main() -> None:
    text = PLAN.format(server="server master = 1", on="on master", period=1, mode="round_robin")
    run = commplan.loads(text).compile(comm, shapes={"params": begin(0)}).bind(comm)
    if run.serve() is None:
        check(trained(run, optax.sgd(float(ETA)), RANK), expected(1, np.float32(0), at_once=False)[RANK])
        try:
            commplan.optax.elastic(run, "weights")
        except CommplanError as error:
            assert error.diagnostics[0].code == "CP0823"
        else:
            raise AssertionError("an input that the plan does not average was taken")
        run.close()
    workers = comm.Split(int(RANK == 2), RANK)
    if RANK < 2:
        text = PLAN.format(server="", on="", period=2, mode="sync")
        run = commplan.loads(text).compile(workers, shapes={"params": begin(0)}).bind(workers)
        result = trained(run, optax.sgd(float(ETA), momentum=float(MU)), RANK)
        check(result, expected(2, MU, at_once=True)[RANK])
    print("ok", flush=True)


main()
