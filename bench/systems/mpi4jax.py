"""mpi4jax's operations, jitted, from `jax.Array` to `jax.Array`.

It has no reduce-scatter: an all-to-all and a local sum replace it, which moves the same bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.work import Operation, Work
from bench.harness.worker import operands
from bench.systems.jitted import Jitted

MPI: Any = importlib.import_module("mpi4py.MPI")
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
mpi4jax: Any = importlib.import_module("mpi4jax")
Array = Any


class Mpi4jax:
    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Clone()  # never one that mpi4py uses too
        self.rank: int = self.comm.Get_rank()
        self.ranks: int = self.comm.Get_size()

    def prepare(self, work: Work) -> Operation:
        given = [[jnp.asarray(x) for x in xs] for xs in operands(work, self.rank, self.ranks)]
        collective = self._one(work.kind)

        def each(xs: list[Array]) -> list[Array]:
            return [collective(x) for x in xs]

        def together(xs: list[Array]) -> list[Array]:
            return fused(collective, xs)

        return Jitted(jax.jit(together if work.how == "fused" else each), given)

    def _one(self, kind: str) -> Callable[[Array], Array]:
        comm, n = self.comm, self.ranks
        calls: dict[str, Callable[[Array], Array]] = {
            "all_reduce": lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm),
            "broadcast": lambda x: mpi4jax.bcast(x, 0, comm=comm),
            "reduce_scatter": lambda x: mpi4jax.alltoall(x.reshape(n, -1), comm=comm).sum(0),
            "all_gather": lambda x: mpi4jax.allgather(x, comm=comm).reshape(-1),
        }
        return calls[kind]


def fused(collective: Callable[[Array], Array], xs: list[Array]) -> list[Array]:
    """All tensors through one call, concatenated before and cut apart after."""
    total = collective(jnp.concatenate(xs))
    ends = np.cumsum([x.size for x in xs])[:-1].tolist()
    return jnp.split(total, ends)


def connect() -> Mpi4jax:
    return Mpi4jax()
