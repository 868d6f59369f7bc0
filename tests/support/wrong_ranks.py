"""Mistakes of ranks; each prints the code of every error. `mpirun -n 2 python wrong_ranks.py`."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType
from mpi4py import MPI

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.machines import ranks
from commplan.topology import Level, Topology

FUNCTION = """plan f
axis data = 2
fn scale(f32[4]) -> f32[4] on device
input x : f32[4] partial data
each step {
    y = reduce x over data by sum
    z = map scale(y)
    output z
}
"""
PLAN = """plan p
ensemble member = 2
axis data = ?
input x : f32[4] per member partial data
each step {
    y = reduce x over data by sum
    output y
}
"""
X = np.ones(4, np.float32)


def refused(label: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except CommplanError as error:
        first = error.diagnostics[0]
        print(f"{label}: {first.code} {first.message}", flush=True)
    except ArithmeticError as error:
        print(f"{label}: ArithmeticError {error}", flush=True)
    else:
        print(f"{label}: taken", flush=True)


def main() -> None:
    comm: Any = MPI.COMM_WORLD
    plan = commplan.loads(PLAN)
    program = plan.compile(comm)
    run = program.bind(comm)
    other = plan.compile(axes={"data": 2})
    mesh = jax.make_mesh((1, 1), ("member", "data"), (AxisType.Auto,) * 2)

    refused("a size that does not fit", lambda: plan.compile(comm, axes={"data": 3}))
    refused("an axis left over", lambda: commplan.loads(PLAN.replace("= 2", "= 3")).compile(comm))
    refused("a program for more ranks", lambda: plan.compile(backend="mpi", axes={"data": 2}).bind(comm))
    refused("a program for a mesh", lambda: plan.compile(axes={"data": 1}).bind(comm))
    refused("a mesh for ranks", lambda: program.bind(mesh))
    refused("the wrong backend", lambda: plan.compile(comm, backend="jax"))
    refused("no backend", lambda: plan.compile(backend="nccl", axes={"data": 1}))  # pyright: ignore
    refused("another member", lambda: run.member(1 - comm.rank))
    refused("parts of others", lambda: run.join("y", {1 - comm.rank: X}))
    refused("a leading dimension", lambda: run.step(run.init(), x=X[None]))
    refused("an unknown input", lambda: run.step(run.init(), z=X))
    refused("a derivative", lambda: _derivative(comm))
    refused("a batch", lambda: _batched(comm))
    refused("other programs", lambda: _different(comm))
    refused("other seeds", lambda: program.bind(comm, seed=7 + comm.rank))
    freed = comm.Dup()
    freed.Free()
    refused("a freed communicator", lambda: plan.compile(freed))
    refused("a freed communicator to bind", lambda: program.bind(freed))
    sides = MPI.COMM_SELF.Create_intercomm(0, comm, 1 - comm.rank)
    refused("two sides", lambda: program.bind(sides))
    _one_name(comm)
    _order_of_hosts(comm)
    assert other.schedule.backend == "jax"
    out, _ = run.step(run.init(), x=X)  # after all that it still works
    assert (np.asarray(out.y) == 1).all()


def _one_name(comm: Any) -> None:
    """The ranks are on two networks, whose machines have one name."""
    with mock.patch.object(ranks, "_network", lambda: str(comm.rank)), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            ranks.host_names(comm)
        except RuntimeWarning as warning:
            print(f"one host name: {warning}", flush=True)
    assert ranks.host_names(comm) == [socket.gethostname()] * 2  # warnings are errors here


def _order_of_hosts(comm: Any) -> None:
    """Rank 0 is on node10, rank 1 on node2, and the topology lists no hosts: the log of the ranks."""
    log = logging.getLogger("commplan.topology")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"hosts {comm.rank}: %(message)s"))
    log.addHandler(handler)
    topology = Topology("two", (Level("gpu", 2, 1e-6, 1e9), Level("node", 2, 1e-5, 1e8)))
    with mock.patch.object(ranks, "host_names", lambda *_: ["node10", "node2"]):
        for _ in range(2):
            compiled = commplan.loads(PLAN.replace("member = 2", "member = 1")).compile(
                comm, topology=topology
            )
    print(f"assumed {comm.rank}: {compiled.schedule.topology.assumed[0]}", flush=True)


def _derivative(comm: Any) -> Any:
    run = commplan.loads(PLAN.replace("member = 2", "member = 1")).compile(comm).bind(comm)
    return jax.grad(lambda x: run.step(run.init(), x=x)[0].y.sum())(X)


def _batched(comm: Any) -> Any:
    run = commplan.loads(PLAN.replace("member = 2", "member = 1")).compile(comm).bind(comm)
    return jax.vmap(lambda x: run.step(run.init(), x=x)[0].y)(np.ones((3, 4), np.float32))


def _different(comm: Any) -> Any:
    """Every rank compiles for other shapes."""
    plan = commplan.loads("plan q\naxis data = 2\ninput x : tree partial data\neach step {\n"
                          "    y = reduce x over data by sum\n    output y\n}\n")  # fmt: skip
    tree = {"w": np.zeros(3 + comm.rank, np.float32)}
    return plan.compile(comm, shapes={"x": tree}).bind(comm)


def alone() -> None:
    """An error on rank 1 alone, and the messages of both; then they bind the correct plan, together."""
    comm: Any = MPI.COMM_WORLD
    plan, plain = commplan.loads(FUNCTION), commplan.loads(PLAN.replace("member = 2", "member = 1"))
    right, scale = plan.compile(comm), {"scale": lambda x: x}

    def bind(label: str, program: Any = right, **keywords: Any) -> None:
        wrong = comm.rank == 1
        refused(
            f"{label} {comm.rank}",
            lambda: (program if wrong else right).bind(
                comm, **{"functions": scale} | (keywords if wrong else {})
            ),
        )

    bind("size", plain.compile(backend="mpi", axes={"data": 3}), functions={})
    bind("backend", plain.compile(axes={"data": 2}), functions={})
    bind("function", functions={})
    bind("unknown source", sources={"s": X})
    bind("seed", seed="1")
    bind("error", seed=_Broken())
    bind("nothing")


class _Broken:
    """A seed that raises an error other than CommplanError."""

    def __index__(self) -> int:
        raise ArithmeticError("out of luck")


def threads() -> None:
    plan = commplan.loads(PLAN)
    refused("few threads", lambda: plan.compile(MPI.COMM_WORLD))


if __name__ == "__main__":
    {"threads": threads, "alone": alone}.get("".join(sys.argv[1:]), main)()
