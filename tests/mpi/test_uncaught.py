"""A failing rank ends the others, which wait for it in a collective or for its input."""

from __future__ import annotations

import pytest
from support import mpirun
from support.campaign import parameters

mpirun.needs_mpi()

COLLECTIVES = """
import sys
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
try:
    sys.exit(4)
except SystemExit as caught:
    assert caught.code == 4
if MPI.COMM_WORLD.rank == 1:
    FAILS
run.step(state, x=np.ones(4, np.float32))[0].y.block_until_ready()
print("went on")
"""
INPUT = """
import sys
from mpi4py import MPI
import numpy as np, commplan
PLAN = '''plan feeds
ensemble member = 2
source x : u8[4]
fn twice(u8[4]) -> u8[4] on host
each step {
    raw = load x batch 4 visit exactly_once seed 3
    b   = map twice(raw)
    b   = share b over member via all_shared
    output b
}
'''
run = commplan.loads(PLAN).compile(MPI.COMM_WORLD).bind(
    MPI.COMM_WORLD, sources={"x": np.ones((16, 4), np.uint8)}, functions={"twice": lambda x: x + x}
)
if MPI.COMM_WORLD.rank == 1:
    FAILS
for item in run.batches():
    pass
print("went on")
"""


RAISES = ("raise ValueError('out of luck')", 1, "ValueError: out of luck")
EXITS = [("sys.exit(3)", 3, ""), ("sys.exit('out of luck')", 1, "out of luck")]


@pytest.mark.parametrize(
    ("fails", "status", "message", "code"),
    parameters(
        [(*RAISES, "input"), *((*fails, "collectives") for fails in EXITS)],
        [(*RAISES, "collectives"), *((*fails, "input") for fails in EXITS)],
    ),
)
def test_a_rank_that_fails_ends_all(fails: str, status: int, message: str, code: str):
    """Without `-m mpi4py`."""
    hooks = "commplan.install_hooks()\n" if fails != RAISES[0] else ""
    program = {"collectives": COLLECTIVES, "input": INPUT}[code].replace("FAILS", fails)
    done = mpirun.start(2, program.replace("PLAN =", f"{hooks}PLAN =", 1))
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "went on" not in done.stdout


@pytest.mark.parametrize("leaves", parameters(["sys.exit()"], ["sys.exit(0)", "raise SystemExit"]))
def test_leaving_without_a_code_ends_nobody_else(leaves: str):
    code = COLLECTIVES.replace("FAILS", "pass")
    after = f"if MPI.COMM_WORLD.rank == 1: {leaves}\nimport time; time.sleep(1); print('at the end')\n"
    output = mpirun.run(2, code + after)
    assert output.count("went on") == 2 and output.count("at the end") == 1


def test_what_is_caught_may_be_given_another_code():
    raises = "\n    ".join(
        ["try:", "    sys.exit(4)", "except SystemExit as caught:", "    caught.code = 5", "    raise"]
    )
    program = COLLECTIVES.replace("FAILS", raises).replace("PLAN =", "commplan.install_hooks()\nPLAN =", 1)
    assert mpirun.start(2, program).returncode == 5


def test_a_thread_may_leave_without_a_word():
    ends = "import threading; one = threading.Thread(target=sys.exit, args=(5,)); one.start(); one.join()"
    done = mpirun.start(2, COLLECTIVES.replace("FAILS", ends))
    assert done.stdout.count("went on") == 2
    assert "Traceback" not in done.stderr
