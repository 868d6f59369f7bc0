"""Run on every rank by test_fragments.py: streaming DiLoCo in fragments, hidden under steps or not.

    mpirun -n 4 python fragments_worker.py

Every rank is an island, and prints "ok".
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from mpi4py import MPI
from support.diloco import FRAGMENTS, ISLANDS, SHAPES, Reference, text, weights

import commplan
from commplan.ir.schedule import Collective

comm = MPI.COMM_WORLD
RANK = comm.Get_rank()


def island(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x[RANK] for name, x in params.items()}


def check(params: Any, reference: Reference) -> None:
    for name, expected in reference.params.items():
        np.testing.assert_allclose(np.asarray(params[name]), expected[RANK], rtol=0, atol=2e-6)


def train(*, split: bool, hidden: int) -> None:
    plan = commplan.loads(text(split=split, hidden=hidden), "streaming.plan")
    start = weights(0)
    program = plan.compile(comm, shapes={"params": island(start)})
    run = program.bind(comm)
    phase = run.every[36]
    forms = {op.form for op in program.schedule.phase("every_36").ops if isinstance(op, Collective)}
    assert forms == {"split" if hidden else "call"}, forms

    @jax.jit
    @run.spmd(params="params", moves="per island")
    def window(state: Any, params: Any, moves: Any) -> Any:
        call = phase.begin(state, params=params) if hidden else None
        for step in range(4):
            params = params if call is None else call.advance(params)
            params = jax.tree.map(lambda x, move, step=step: x + move[step], params, moves)
        out, state = call.finish(state, params=params) if call else phase(state, params=params)
        return state, out.params

    reference = Reference(start, ISLANDS if split else 1)
    _, state = run.start(run.init(), params=island(start))
    params = island(start)
    for number in range(FRAGMENTS + 2):
        moves = {name: np.stack([weights(4 * number + n)[name] for n in range(4)], 1) / 4 for name in SHAPES}
        total = {name: x.sum(1) for name, x in moves.items()}
        state, params = window(state, params, island(moves))
        if not hidden:
            reference.params = {name: x + total[name] for name, x in reference.params.items()}
        reference.exchange(total if hidden else None)
        check(params, reference)
    run.close()


def main() -> None:
    for split in (False, True):
        for hidden in (0, 1, 4):
            train(split=split, hidden=hidden)
    print("ok")


if __name__ == "__main__":
    main()
