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
    step, the arrays of the call represent its arguments (`entered`).
    """

    def __init__(self, schedule: ir.Schedule) -> None:
        starts = [phase for phase in schedule.phases if phase.kind == "start"]
        self._file = schedule.file
        self._set = {binding.name for phase in starts for binding in phase.updates}
        self._initial = ByIdentity[str]()
        self._entered = threading.local()

    def add(self, name: str, leaves: Sequence[Any]) -> None:
        """Record `leaves` as the initial value of state `name`."""
        if name in self._set:
            for leaf in leaves:
                self._initial[leaf] = name

    def among(self, state: object) -> set[str]:
        """The names of states in `state` that nothing has set."""
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
        """Track the states of a step while it is traced.

        Args:
            state: The state of the call.
            unset: Its names that nothing has set.
            used: Receives the first phase that uses each state before the step sets it.
        """
        before = getattr(self._entered, "step", None)
        leaves = {id(leaf): name for name in self._set.intersection(state) for leaf in _leaves(state[name])}
        self._entered.step = leaves, unset, used
        try:
            yield
        finally:
            self._entered.step = before

    def check(self, phase: ir.Phase, state: Mapping[str, Any]) -> None:
        """Raise CP0824 if `phase` uses a state that nothing has set."""
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
        """Raise CP0824: `phase` uses state `name`."""
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
