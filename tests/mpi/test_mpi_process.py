"""Uses of a process around its collectives: no jit, unused results, forks, and the end of MPI."""

from __future__ import annotations

from support import mpirun

mpirun.needs_mpi()

BEGIN = """
import os, warnings
import jax, numpy as np
from mpi4py import MPI
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel, Spec
from commplan.lowering.mpi.job.drain import _drain
comm = MPI.COMM_WORLD
channel = Channel(comm)
def run(x, form="call"):
    spec = Spec("all_reduce", algorithm=Algorithm("ring"), form=form)
    return np.asarray(jax.jit(lambda x, token: channel.run(x, spec, token)[0])(x, channel.token()))
x = np.arange(5, dtype=np.float32)
"""


# Of one job, one after the other.
WITHOUT_JIT = """
with jax.disable_jit():
    assert (run(x) == 2 * x).all() and (run(x, 'split') == 2 * x).all()
"""
# Otherwise its memory could be reused while messages arrive in it.
UNUSED_RESULTS = """
spec = Spec('all_reduce', algorithm=Algorithm('ring'), form='split')
def first(x, y, token):
    one, token = channel.start(x, spec, token)
    other, token = channel.start(y, spec, token)
    total, token = channel.finish(one, token)
    channel.finish(other, token)
    return total
def looped(x, y, token):
    return jax.lax.fori_loop(0, 1, lambda _, held: first(held, y, token), x)
for function in (first, looped):
    lowered = jax.jit(function).lower(x, np.ones(9), channel.token())
    text = lowered.compile().as_text()
    calls = [text.count(f'commplan_mpi_{name}"') for name in ('start', 'finish')]
    assert calls == [2, 2], calls
    assert (jax.jit(function)(x, np.ones(9), channel.token()) == 2 * x).all()
"""
# A forked process waits for no thread of its parent; JAX warns of forks.
FORK = """
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    assert (run(x, 'split') == 2 * x).all()
    child = os.fork()
    if child == 0:
        _drain()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (run(x, 'split') == 2 * x).all()
"""
# A rank without jit issues what the others compile: begun or called at once, whatever part of it is used.
ONE_WITHOUT_JIT = """
jax.config.update('jax_disable_jit', comm.rank == 1)
def drop(spec, x, y, token):
    one, token = channel.start(x, spec, token)
    one, token = channel.finish(one, token)
    channel.run(y, spec, token)
    return one
for name in ('ring', 'native'):
    for form in ('call', 'split'):
        spec = Spec('all_reduce', algorithm=Algorithm(name), form=form)
        step = jax.jit(lambda *xs: drop(spec, *xs))
        for _ in range(3):
            assert (step(x, x[:3], channel.token()) == 2 * x).all()
"""


def test_collectives_without_jit_without_readers_and_beside_forks():
    code = BEGIN + WITHOUT_JIT + UNUSED_RESULTS + FORK + ONE_WITHOUT_JIT
    assert mpirun.run(2, code + "print('end')\n").split() == ["end", "end"]


def test_exit_handlers_may_use_a_program():
    """Those that were registered since commplan was imported."""
    begin = "import atexit, commplan\natexit.register(lambda: print(run(x, 'split'), run(x), flush=True))\n"
    assert mpirun.run(2, f"{begin}{BEGIN}\nrun(x)").count("[0. 2. 4. 6. 8.] [0. 2. 4. 6. 8.]") == 2


def test_after_mpis_end_a_call_is_an_error():
    code = (
        "assert (run(x) == 2 * x).all()\n"
        "spec, token = Spec('all_reduce', algorithm=Algorithm('ring')), channel.token()\n"
        "again = jax.jit(lambda x, token: channel.run(x, spec, token)[0])\n"
        "again(x, token).block_until_ready()\n"
        "MPI.Finalize()\n"
        "try:\n"
        "    again(x, token).block_until_ready()\n"
        "except (ValueError, RuntimeError) as error:\n"
        "    print('told' if 'MPI has been finalized' in str(error) else error)\n"
    )
    assert mpirun.run(2, BEGIN + code).split() == ["told", "told"]


def test_a_rank_without_jit_meets_the_others_for_communicators():
    """They compile all collectives before the first one runs."""
    code = (
        "import commplan\n"
        "plan = 'plan p\\naxis a = 2\\naxis b = 2\\ninput x : f32[5] partial a\\n'\n"
        "plan += 'input z : f32[5] partial a, b\\neach step {\\n y = reduce x over a by sum\\n'\n"
        "plan += ' w = reduce z over a, b by sum\\n output y, w\\n}'\n"
        "jax.config.update('jax_disable_jit', comm.rank == 1)\n"
        "bound = commplan.loads(plan).compile(comm).bind(comm)\n"
        "out, _ = bound.step(bound.init(), x=x, z=x)\n"
        "assert (out.y == 2 * x).all() and (out.w == 4 * x).all()\n"
    )
    mpirun.run(4, BEGIN + code)


def test_mpi_may_end_before_a_program_that_has_compared_steps():
    code = (
        "import time, commplan\n"
        "plan = 'plan p\\naxis a = 2\\ninput x : f32[5] partial a\\n'\n"
        "plan += 'each step {\\n y = reduce x over a by sum\\n output y\\n}'\n"
        "bound = commplan.loads(plan).compile(comm).bind(comm)\n"
        "step = bound.jit(lambda state, x: bound.step(state, x=x))\n"
        "assert (step(bound.init(), x)[0].y == 2 * x).all()\n"
        "MPI.Finalize()\n"
        "time.sleep(0.3)\n"
        "print('ended')\n"
    )
    assert mpirun.run(2, BEGIN + code).split() == ["ended", "ended"]
