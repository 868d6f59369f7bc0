"""Two members of two ranks with different steps: `mpirun -n 4 python preflight_grid.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commplan
from commplan.diagnostics import CommplanError

PLAN = """plan grid
ensemble member = 2
axis data = 2
input x : f32[4] per member partial data
input y : f32[3] per member, data
each step {
    s = reduce x over data by sum
    output s
}
phase best {
    m = reduce y across member by max
    output m
}
"""
X, Y = np.ones(4, np.float32), np.ones(3, np.float32)


def main() -> None:
    comm: Any = MPI.COMM_WORLD
    run = commplan.loads(PLAN).compile(comm).bind(comm)
    member, data = run.place["member"], run.place["data"]

    def rows(x: Any) -> Any:
        return run.step({}, x=x)[0].s

    def columns(y: Any) -> Any:
        return run.best({}, y=y)[0].m

    def tell(case: str, step: Callable[..., Any]) -> None:
        try:
            result = str(np.asarray(jax.block_until_ready(step(X, Y))).tolist())
        except CommplanError as error:
            result = str(error).replace("\n", " ")
        print(f"{case} {comm.rank}: {result}", flush=True)

    member_run = run.member(member)
    tell(
        "members",
        member_run.jit(
            lambda x, _: sum(member_run.step({}, x=x)[0].s for _ in range(1 + member)), timeout=20.0
        ),
    )
    tell("roles", run.jit(lambda x, y: (rows(x) if member else x).sum() + columns(y).sum(), timeout=20.0))
    crossed = member != data
    both = [lambda x, y: rows(x).sum() + columns(y).sum(), lambda x, y: columns(y).sum() + rows(x).sum()]
    tell("crossed", run.jit(both[crossed], timeout=20.0))
    alone = run.jit(lambda x: x.sum(), timeout=20.0)  # no collectives: each rank may call different ones
    tell("local", lambda x, _: alone(x[: 1 + comm.rank]))
    apart = comm.Split(member, comm.rank)  # a communicator of the user's for each member
    import mpi4jax  # noqa: PLC0415

    tell("split", run.jit(lambda x, y: mpi4jax.allreduce(x, op=MPI.SUM, comm=apart).sum(), timeout=20.0))
    wrong = apart if comm.rank else comm
    tell("wrong", run.jit(lambda x, y: mpi4jax.allreduce(x, op=MPI.SUM, comm=wrong).sum(), timeout=20.0))


if __name__ == "__main__":
    main()
