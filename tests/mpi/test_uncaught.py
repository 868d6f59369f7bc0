"""An exception on one rank ends the others, which wait for it in a collective."""

from __future__ import annotations

from support import mpirun

mpirun.needs_mpi()

CODE = """
from mpi4py import MPI
import numpy as np, commplan
PLAN = '''plan sums
axis data = ?
input x : f32[4] partial data
each step {
    y = reduce x over data by sum
    output y
}
'''
run = commplan.loads(PLAN).compile(MPI.COMM_WORLD).bind(MPI.COMM_WORLD)
out, state = run.step(run.init(), x=np.ones(4, np.float32))
assert out.y[0] == 2
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("out of luck")
run.step(state, x=np.ones(4, np.float32))[0].y.block_until_ready()
print("went on")
"""


def test_an_exception_on_one_rank_ends_all():
    """Without `-m mpi4py`."""
    done = mpirun.start(2, CODE)
    assert done.returncode != 0
    assert "ValueError: out of luck" in done.stderr
    assert "went on" not in done.stdout
