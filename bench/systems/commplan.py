"""commplan under MPI, through its public face: a plan of one line, compiled for the lab, bound to the
communicator, its phase called under jit. `how` is that of `bench.harness.plans`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from bench.harness.plans import chosen, program
from bench.harness.work import Floats, Operation, Work
from bench.harness.worker import operands
from bench.systems.jitted import Jitted

MPI: Any = importlib.import_module("mpi4py.MPI")
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
Array = Any
# Files that the parent writes once the lab exists and its rates are measured.
TOPOLOGY, CALIBRATION = "COMMPLAN_BENCH_TOPOLOGY", "COMMPLAN_BENCH_CALIBRATION"


class Commplan:
    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank: int = self.comm.Get_rank()
        self.ranks: int = self.comm.Get_size()

    def prepare(self, work: Work) -> Operation:
        if work.kind == "empty":
            return Empty(work)
        places = {"topology": os.environ.get(TOPOLOGY), "calibration": os.environ.get(CALIBRATION)}
        compiled = program(work, self.comm, **places)
        given = [[jnp.asarray(x) for x in xs] for xs in operands(work, self.rank, self.ranks)]
        return phase(compiled.bind(self.comm), given, chosen(compiled.schedule))


def phase(run: Any, given: list[list[Array]], note: str) -> Jitted:
    """The phase `step` of a bound plan, jitted: a list of arrays in, a list of arrays out."""
    state = run.init()

    def step(xs: list[Array]) -> list[Array]:
        outputs, _ = run.step(state, x=xs)
        return outputs.y

    return Jitted(jax.jit(step), given, note)


class Empty(Operation):
    """A call of the engine that does nothing: the cost of leaving XLA and returning."""

    def __init__(self, work: Work) -> None:
        importlib.import_module("commplan.lowering.mpi.build").library()
        self._given = jnp.zeros(max(1, sum(work.counts)), "float32")
        shape = jax.ShapeDtypeStruct(self._given.shape, self._given.dtype)
        target = jax.ffi.ffi_call("commplan_mpi_empty", shape, has_side_effect=True)
        self._call: Callable[[Array], Array] = jax.jit(target)

    def fill(self, variant: int) -> None:
        del variant

    def run(self) -> None:
        jax.block_until_ready(self._call(self._given))

    def results(self) -> list[Floats]:
        return []


def connect() -> Commplan:
    return Commplan()
