"""Executes the ops of a phase while it is traced.

`Execution` runs ops in order and completes split collectives when their results are read. `PhaseInFlight`
spreads the ops of a hidden phase over the steps of the program that hide its exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from commplan.ir import schedule as ir
from commplan.ir.analysis.rounds import rounds
from commplan.ir.analysis.server_ops import worker_operands
from commplan.ir.plan import name_of
from commplan.lowering.jax import packing
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.functions import RngContext
from commplan.lowering.jax.packing import Env
from commplan.lowering.jax.pytree import Tree


@dataclass(frozen=True)
class CallContext:
    """The parameters of one call of a phase.

    Attributes:
        number: The number of earlier calls of the phase, an i32 scalar; None if the phase does not depend on
            it.
        rng: The source of random keys; None if no function of the phase is random.
    """

    number: jax.Array | None = None
    rng: RngContext | None = None


ONCE = CallContext()  # for a phase that depends neither on the number of its call nor on random keys


class LoweredPhase(Protocol):
    """A phase whose ops are executed: the interface of `lowering.jax.phase.Lowered`, which documents it."""

    @property
    def phase(self) -> ir.Phase: ...
    @property
    def backend(self) -> Backend: ...
    def scope(self, op: ir.Op) -> Any: ...
    def start(self, op: ir.Op, env: Env) -> Callable[[], Env] | None: ...
    def run_op(
        self, op: ir.Op, env: Env, chained: set[str], call: CallContext, elision: packing.PackElision
    ) -> None: ...
    def results(self, env: Env) -> tuple[Env, Env]: ...


class Execution:
    """The execution of one call of a phase. Each call of `run` executes some of its ops.

    Args:
        lowered: The phase.
        values: All values of the phase, by id.
        sequence: All ops that will run, in order.
        env: The values so far, by id; results are added.
        call: The parameters of the call.

    Attributes:
        elision: The buffers that need not be created.
        chained: The results after which later ops are ordered.
    """

    def __init__(
        self, lowered: LoweredPhase, values: Mapping[str, ir.Value], sequence: Sequence[ir.Op], env: Env,
        call: CallContext,
    ) -> None:  # fmt: skip
        self.lowered, self.values, self.env, self.call = lowered, values, env, call
        self.elision = packing.pack_elision(sequence, values, lowered.backend)
        self.chained = {ref for op in sequence for ref in op.after}
        self._in_flight: list[tuple[ir.Op, Callable[[], Env]]] = []

    def run(self, ops: Iterable[ir.Op]) -> None:
        """Run `ops` in order. Split collectives and requests are completed only before an op reads them."""
        lowered, env, elision = self.lowered, self.env, self.elision
        for op in ops:
            if self._in_flight:
                self.complete(worker_operands(op, self.values))
            with lowered.scope(op):
                finish = elision.begin(op, env) or lowered.start(op, env)
                if finish is None:
                    if not elision.defers(op, env):
                        lowered.run_op(op, env, self.chained, self.call, elision)
                elif isinstance(op, ir.Collective) and op.form != "split":
                    env |= finish()
                else:
                    self._in_flight.append((op, finish))

    def complete(self, needed: Container[str] | None = None) -> None:
        """Complete the split collectives and requests that compute the values `needed`; all for None."""
        for started in list(self._in_flight):
            op, finish = started
            if needed is None or any(ref in needed for ref in ir.results(op)):
                self._in_flight.remove(started)
                with self.lowered.scope(op):
                    self.env.update(finish())


class PhaseInFlight:
    """A hidden phase between its beginning and its end. Its first exchanges begin at once.

    Args:
        execution: The execution of the phase; it has not run any op.
        ops: The ops of the phase, in order.
    """

    def __init__(self, execution: Execution, ops: Sequence[ir.Op]) -> None:
        self.lowered, self.env = execution.lowered, execution.env
        (first, *self._rounds), self._end = rounds(ops)
        self._count, self._steps = 1 + len(self._rounds), -1
        self._execution = execution
        self._execution.run(first)

    def advance(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Begin the exchanges that are due before the next step of the program.

        Args:
            values: The values on which the step computes.

        Returns:
            The values, ordered after these exchanges.
        """
        self._steps += 1
        if self._steps:
            self.lowered.backend.wait_for(values)
        # The rounds are spread evenly over the steps: round i of n begins before step i * hidden / n.
        hidden = self.lowered.phase.hidden
        while self._rounds and (self._count - len(self._rounds)) * hidden <= self._steps * self._count:
            self._execution.run(self._rounds.pop(0))
        return self.lowered.backend.after_begun(values)

    def finish(self, inputs: Mapping[str, Tree]) -> tuple[Env, Env]:
        """Run the rest of the phase.

        Args:
            inputs: The values at the end of the phase, by name, of the inputs that it reads late.

        Returns:
            The outputs and the new states, by name.
        """
        self.lowered.backend.wait_for([x for tree in inputs.values() for x in tree.leaves])
        for exchange in self._rounds:
            self._execution.run(exchange)
        self.env |= {ref: inputs[name_of(ref)] for ref in self.lowered.phase.inputs if name_of(ref) in inputs}
        self._execution.run(self._end)
        self._execution.complete()
        return self.lowered.results(self.env)
