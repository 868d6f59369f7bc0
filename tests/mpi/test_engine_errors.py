"""Operations that cannot be done raise a diagnostic on every rank, and there is a path without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mpirun

mpirun.needs_mpi()

MISTAKES = """
from commplan.diagnostics import CommplanError
from commplan.ir.plan import Algorithm
import jax
import jax.numpy as jnp
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec
from mpi4py import MPI

comm = MPI.COMM_WORLD
channel = Channel(comm)
token = channel.token()
ring = Spec("all_reduce", algorithm=Algorithm("ring"))


def told(what, call):
    try:
        call()
    except CommplanError as error:
        answer = error.diagnostics[0].code + " " + error.diagnostics[0].message
    except Exception as error:
        answer = type(error).__name__ + " " + str(error)
    else:
        answer = "nothing"
    for each in comm.gather(answer) or []:
        print(f"{what}: {each}".replace(chr(10), " "), flush=True)


told("sizes", lambda: Channel(comm, {"data": 3}))
told("axis", lambda: channel.run(jnp.ones(4), Spec("all_reduce", ("rack",)), token))
told("kind", lambda: channel.run(jnp.ones(4), Spec("scan"), token))
told("cut", lambda: channel.run(jnp.ones(3), Spec("reduce_scatter"), token))
told("scalar", lambda: channel.run(jnp.ones(()), Spec("all_to_all"), token))
told("type", lambda: channel.run(jnp.ones(4, jnp.complex64), ring, token))
told("algorithm", lambda: channel.run(jnp.ones(4), Spec("broadcast", algorithm=Algorithm("bruck2")), token))
compiled = jax.jit(lambda x, t: channel.run(x, ring, t))
total, token = compiled(jnp.ones(4), token)
assert (total == comm.Get_size()).all()
channel.close()
channel.close()
told("closed", lambda: channel.run(jnp.ones(5), ring, token))
told("compiled", lambda: jax.block_until_ready(compiled(jnp.ones(4), token)))
"""


def test_every_rank_is_told_what_is_wrong():
    answers: dict[str, list[str]] = {}
    for line in mpirun.run(2, MISTAKES).splitlines():
        case, _, answer = line.partition(": ")
        answers.setdefault(case, []).append(answer)
    expected = {
        "sizes": "CP0831 data = 3 is 3 ranks, but the communicator has 2",
        "axis": "CP0831 there is no axis `rack`",
        "kind": "CP0831 there is no collective `scan`",
        "cut": "CP0831 reduce_scatter over 2 ranks cannot divide a leading dimension of 3",
        "scalar": "CP0831 all_to_all over 2 ranks cannot divide a scalar",
        "type": "CP0831 arrays of complex64 cannot be reduced",
        "algorithm": "CP0601",
        "closed": "CP0832 this channel is closed",
        "compiled": "the channel of this program is closed",
    }
    for case, words in expected.items():
        assert len(answers[case]) == 2, answers
        assert all(words in answer for answer in answers[case]), answers[case]


FALLBACK = """
import warnings
from commplan.ir.plan import Algorithm
import jax
import jax.numpy as jnp
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec
from mpi4py import MPI

comm = MPI.COMM_WORLD
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    channel = Channel(comm)
ring = Spec("all_reduce", algorithm=Algorithm("ring"))


def both(x, token):
    y, token = channel.run(x, ring, token)
    pending, token = channel.start(y, ring, token)
    return channel.finish(pending, token)


total, _ = jax.jit(both)(jnp.ones(7), channel.token())
assert (total == comm.Get_size() ** 2).all()
every = comm.gather([str(each.message) for each in caught])
if comm.Get_rank() == 0:
    print(every)
"""


def test_without_a_compiler_messages_go_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPICXX", "/nowhere/mpicxx")
    output = mpirun.run(2, FALLBACK)
    assert "message by message" in output
    assert "CP0830" in output
    assert "`/nowhere/mpicxx` (from MPICXX) was not found" in output


def test_a_compiler_that_cannot_be_started_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    words = tmp_path / "mpicxx"
    words.write_text("no program\n")
    words.chmod(0o755)
    monkeypatch.setenv("MPICXX", str(words))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = mpirun.run(2, FALLBACK)
    assert "the MPI engine cannot be compiled" in output
    assert str(words) in output


def test_what_does_not_compile_is_told_with_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "mpicxx"
    broken.write_text("#!/bin/sh\necho 'mpi.h: error: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("MPICXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = mpirun.run(2, FALLBACK)
    assert "does not compile: mpi.h: error: no such file" in output
    assert not list((tmp_path / "cache" / "commplan").glob("*.so"))


BUILT = """
from commplan.lowering.mpi import build
print(build._compiled_engine(build.compiler_command(), build.mpi_library()))
"""


def test_of_ranks_that_start_together_one_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With a slow compiler that links the existing engine."""
    engine, links, wrapper = mpirun.run(1, BUILT).strip(), tmp_path / "links", tmp_path / "mpicxx"
    script = f'case "$*" in *-shared*) sleep 0.3; echo >> {links}; cp {engine} "$last";; esac'
    wrapper.write_text(f"#!/bin/sh\nfor last do :; done\n{script}\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("MPICXX", str(wrapper))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert mpirun.run(4, FALLBACK).strip() == "[[], [], [], []]"
    assert len(links.read_text().splitlines()) == 1
    suffixes = sorted(path.suffix for path in (tmp_path / "commplan").iterdir())
    assert suffixes == [".lock", ".so"]
