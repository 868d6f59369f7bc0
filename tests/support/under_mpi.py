"""Random plans on the ranks of a communicator: `mpirun -n N python under_mpi.py SEED COUNT LEAST [FORMS]`.

COUNT cases from SEED on, those for LEAST to N ranks, in the forms given in turn ("usual": as compiled). Each
rank runs its part of every case and compares it with the oracle; cases for fewer ranks run on the first ones
alone.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from mpi4py import MPI
from msgspec.structs import replace
from support.agreement import DisagreementError, Ways, inputs_of, precision, same_leaf
from support.oracle.layout import Grid, spread
from support.random_case import make_case

from commplan.api import Program
from commplan.ir import schedule as ir
from commplan.pytree import flatten
from commplan.runtime.context import CALLS

Tree = Any


class UnderMpi:
    """A program on the ranks of `comm`, and the oracle's result for this one."""

    def __init__(self, ways: Ways, comm: Any, program: Any) -> None:
        self.ways, self.schedule = ways, program.schedule
        self.run = program.bind(comm, functions=ways.case.functions)
        self.grid = Grid(self.schedule)
        self.rank = self.grid.ranks[comm.Get_rank()]
        self.epsilon = precision(self.schedule)

    def own(self, value: ir.Value, tree: Tree) -> Tree:
        """This rank's part of a tree in the global layout."""
        pairs, rebuild = flatten(tree)
        buffers = spread(self.grid, value, [np.asarray(leaf) for _, leaf in pairs])
        return rebuild(list(buffers[self.rank]))

    def phase(self, name: str, state: Any, inputs: Mapping[str, Tree], *, jitted: bool) -> Any:
        call = self.run.phases[name]
        arguments = call.lowered.arguments
        rank_inputs = {key: self.own(arguments[key], tree) for key, tree in inputs.items()}
        if not jitted:
            return call(state, **rank_inputs)
        return jax.jit(lambda state, rank_inputs: call(state, **rank_inputs))(state, rank_inputs)

    def check(self, answers: Mapping[str, tuple[dict[str, Tree], dict[str, Tree]]]) -> None:
        """Raise `DisagreementError` unless every phase gives this rank the oracle's result."""
        self.run.check_collectives(seconds=60.0)
        state = self.run.init()
        if CALLS in state:
            state[CALLS] = {name: np.int32(self.ways.case.call) for name in state[CALLS]}
        for number, phase in enumerate(self.ways.phases):
            compiled = self.schedule.phase(phase)
            values = {value.id: value for value in (*self.schedule.entry, *compiled.values)}
            bound = {binding.name: values[binding.value] for binding in compiled.outputs}
            inputs = inputs_of(self.schedule, phase, self.ways.inputs)
            outputs, state = self.phase(phase, state, inputs, jitted=number % 2 == 0)
            expected, after = answers[phase]
            if set(outputs) != set(expected) or not set(after) <= set(state):
                raise DisagreementError(f"{phase}: outputs {sorted(outputs)}, states {sorted(state)}")
            for key, tree in expected.items():
                self._equal(f"{phase}: output {key}", outputs[key], self.own(bound[key], tree))
            for key, tree in after.items():
                self._equal(f"{phase}: state {key}", state[key], self.own(self.ways.entry[key], tree))

    def _equal(self, label: str, got: Tree, expected: Tree) -> None:
        ours, theirs = flatten(got)[0], flatten(expected)[0]
        if [path for path, _ in ours] != [path for path, _ in theirs]:
            raise DisagreementError(f"{label}: leaves {ours}, expected {theirs}")
        for (path, array), (_, target) in zip(ours, theirs, strict=True):
            mine, right = np.asarray(array), np.asarray(target)
            if mine.dtype != right.dtype:
                raise DisagreementError(f"{label} {path}: dtype {mine.dtype}, expected {right.dtype}")
            everywhere = np.ones(right.shape, bool)
            same_leaf(f"{label} {path}", mine, right, everywhere, self.epsilon.get(mine.dtype.name, 0.0))


def for_mpi(program: Any, form: str) -> Any:
    """The program with its collectives in `form`; "usual" leaves them as compiled."""
    schedule = replace(program.schedule, backend="mpi")
    if form != "usual":
        phases = [
            replace(phase, ops=tuple(_in_form(op, form) for op in phase.ops)) for phase in schedule.phases
        ]
        schedule = replace(schedule, phases=tuple(phases))
    return Program(schedule, program.structures)


def _in_form(op: ir.Op, form: Any) -> ir.Op:
    return replace(op, form=form) if isinstance(op, ir.Collective) else op


def main(seed: int, cases: int, least: int, forms: list[str]) -> None:
    world = MPI.COMM_WORLD
    ran = 0
    while ran < cases:
        seed += 1
        case = make_case(seed, builtins=True)
        count = math.prod(case.sizes.values())
        if not least <= count <= world.size:
            continue
        form = forms[ran % len(forms)]
        ran += 1
        comm = world.Split(0 if world.rank < count else MPI.UNDEFINED, world.rank)
        if comm == MPI.COMM_NULL:
            continue
        try:
            ways = Ways(case)
            UnderMpi(ways, comm, for_mpi(ways.program, form)).check(ways.check_oracle())
        except Exception:  # noqa: BLE001  whatever it is, the other ranks must not wait for this one
            print(
                f"seed {seed}, form {form}, rank {comm.rank} of {count}, passes {case.pipeline}\n{case.text}"
            )
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            world.Abort(1)
        comm.Free()
    if world.rank == 0:
        print(f"{ran} plans agree on up to {world.size} ranks")


if __name__ == "__main__":
    seed, wanted, least = map(int, sys.argv[1:4])
    main(seed, wanted, least, sys.argv[4:] or ["usual"])
