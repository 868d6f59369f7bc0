"""What a process may do around its collectives: no jit, results unused, forks, and after MPI's end."""

from __future__ import annotations

from support import mpirun

mpirun.needs_mpi()

BEGIN = """
import os, warnings
import jax, numpy as np
from mpi4py import MPI
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel, Spec
from commplan.lowering.mpi.drain import _drain
comm = MPI.COMM_WORLD
channel = Channel(comm)
def run(x, form="call"):
    spec = Spec("all_reduce", algorithm=Algorithm("ring"), form=form)
    return np.asarray(jax.jit(lambda x, token: channel.run(x, spec, token)[0])(x, channel.token()))
x = np.arange(5, dtype=np.float32)
"""


def test_without_jit_a_collective_is_the_same():
    mpirun.run(
        2,
        BEGIN
        + "with jax.disable_jit():\n    assert (run(x) == 2 * x).all() and (run(x, 'split') == 2 * x).all()",
    )


def test_what_was_started_is_finished_though_its_result_is_not_used():
    """Else its memory would be given to others while messages arrive in it."""
    code = (
        "spec = Spec('all_reduce', algorithm=Algorithm('ring'), form='split')\n"
        "def first(x, y, token):\n"
        "    one, token = channel.start(x, spec, token)\n"
        "    other, token = channel.start(y, spec, token)\n"
        "    total, token = channel.finish(one, token)\n"
        "    channel.finish(other, token)\n"
        "    return total\n"
        "def looped(x, y, token):\n"
        "    return jax.lax.fori_loop(0, 1, lambda _, held: first(held, y, token), x)\n"
        "for function in (first, looped):\n"
        "    lowered = jax.jit(function).lower(x, np.ones(9), channel.token())\n"
        "    text = lowered.compile().as_text()\n"
        "    calls = [text.count(f'commplan_mpi_{name}\"') for name in ('start', 'finish')]\n"
        "    assert calls == [2, 2], calls\n"
        "    assert (jax.jit(function)(x, np.ones(9), channel.token()) == 2 * x).all()\n"
    )
    mpirun.run(2, BEGIN + code)


def test_a_forked_process_waits_for_no_thread_of_its_parent():
    code = (
        "warnings.simplefilter('ignore')\n"  # JAX warns of forks
        "assert (run(x, 'split') == 2 * x).all()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    _drain()\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert (run(x, 'split') == 2 * x).all()\n"
    )
    mpirun.run(2, BEGIN + code)


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
