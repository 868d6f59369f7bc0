"""Two workers with steps under `run.jit`, and a server: `mpirun -n 3 python preflight_servers.py`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commplan
from commplan.diagnostics import CommplanError

PLAN = """plan served
axis worker = 2
server master = 1
input params : f32[4] per worker
state center : f32[4] on master
at start {
    center = broadcast params over worker from 0
}
each step {
    pull, center = elastic params with center over worker by async(eta = 0.05, rho = 0.1)
    norm = reduce params over worker by max
    output pull, norm
}
"""


def main() -> None:
    comm: Any = MPI.COMM_WORLD
    run = commplan.loads(PLAN).compile(comm).bind(comm)

    def step(state: Any, params: Any) -> Any:
        out, state = run.step(state, params=params)
        return out.pull, out.norm, state

    try:
        train = run.jit(step, timeout=20.0)
    except CommplanError as error:
        print(f"{comm.rank}: {error.diagnostics[0].code}", flush=True)
        run.serve()
        return
    params = np.full(4, comm.rank, np.float32)
    _, state = run.start(run.init(), params=params)
    for _ in range(3):
        _, norm, state = train(state, params)
    print(f"{comm.rank}: {float(jax.block_until_ready(norm)[0])}", flush=True)
    run.close()


if __name__ == "__main__":
    main()
