"""Track states that only `run.init()` has set: their zeros must not be used before `at start`."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.runtime.context.identity import ByIdentity


class UnsetStates:
    """The initial zeros of states that `at start` sets, identified as objects.

    A state from a checkpoint is another array, so it is never mistaken for one of them. While JAX traces a
    step, its arguments are tracers. Whether they are unset is known from the arrays of the call (`entered`).
    """

    def __init__(self, schedule: ir.Schedule) -> None:
        starts = [phase for phase in schedule.phases if phase.kind == "start"]
        self._file = schedule.file
        # The names of the states that `at start` sets.
        self._set = {binding.name for phase in starts for binding in phase.updates}
        # The initial arrays that `add` recorded, with the names of their states.
        self._initial = ByIdentity[str]()
        # In `step`: the arguments of the innermost `entered` of this thread, leaves by id.
        self._entered = threading.local()

    def add(self, name: str, leaves: Sequence[Any]) -> None:
        """Record `leaves` as the initial value of state `name`, if `at start` sets it."""
        if name in self._set:
            for leaf in leaves:
                self._initial[leaf] = name

    def among(self, state: object) -> set[str]:
        """The names of states in `state` that still have an initial leaf; empty if `state` is no mapping."""
        if not self._initial or not isinstance(state, Mapping):
            return set()
        states = cast("Mapping[str, Any]", state)
        return {
            name
            for name in self._set.intersection(states)
            if any(self._initial.get(leaf) is not None for leaf in _leaves(states[name]))
        }

    @contextmanager
    def entered(self, state: Mapping[str, Any], unset: set[str], used: dict[str, str]) -> Generator[None]:
        """Track the states of a step while its function runs: traced, or under MPI also on arrays.

        Args:
            state: The state that the step's function gets: tracers, or arrays if it is not traced.
            unset: The names that `among` returned for the caller's state.
            used: Receives the first phase that uses each state before the step sets it, by state. Includes
                states that are set in this call but may be unset in another call of the compiled step.
        """
        before = getattr(self._entered, "step", None)
        leaves = {id(leaf): name for name in self._set.intersection(state) for leaf in _leaves(state[name])}
        self._entered.step = leaves, unset, used
        try:
            yield
        finally:
            self._entered.step = before

    def check(self, phase: ir.Phase, state: Mapping[str, Any]) -> None:
        """Raise CP0824 if `phase` uses a state that is not set; `at start` itself may."""
        if phase.kind == "start" or not self._set:
            return
        reads = self._set.intersection(map(name_of, phase.states))
        for name in sorted(reads & self.among(state)):
            self.refuse(name, phase.name)
        step = getattr(self._entered, "step", None)
        if step is None:
            return
        leaves, unset, used = step
        for name in sorted(reads.intersection(state)):
            if any(leaves.get(id(leaf)) == name for leaf in _leaves(state[name])):
                used.setdefault(name, phase.name)
                if name in unset:
                    self.refuse(name, phase.name)

    def refuse(self, name: str, phase: str) -> None:
        """Raise CP0824: the phase called `phase` uses state `name`, which is not set."""
        fail(
            "CP0824",
            f"phase `{phase}` uses state `{name}` before `at start` has set it: it still has the zeros of"
            " run.init()",
            "call run.start(state, ...) first and continue with the state that it returns, or restore a saved"
            " state",
            file=self._file,
        )


def _leaves(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree)
