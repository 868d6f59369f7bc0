"""States that `at start` sets and nothing has set yet: what `run.init()` made of them is not for use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.lowering.jax.typing_shim import jax


class UnsetStates:
    """The zeros that `run.init()` made for states that `at start` sets, told by who they are.

    A state that was read from a checkpoint is another array, so that it is never taken for one of them. In a
    step that JAX traces, the arrays that it was called with stand for its arguments (`entered`).
    """

    def __init__(self, schedule: ir.Schedule) -> None:
        starts = [phase for phase in schedule.phases if phase.kind == "start"]
        self._file = schedule.file
        self._set = {binding.name for phase in starts for binding in phase.updates}
        self._made: dict[int, weakref.ref[Any]] = {}
        self._entered = threading.local()

    def add(self, name: str, leaves: Sequence[Any]) -> None:
        """`leaves` are what state `name` begins with."""
        if name in self._set:
            for leaf in leaves:
                key = id(leaf)
                self._made[key] = weakref.ref(leaf, lambda _, key=key: self._made.pop(key, None))

    def among(self, state: object) -> set[str]:
        """The names of states in `state` that nothing has set."""
        if not self._made or not isinstance(state, Mapping):
            return set()
        held = cast("Mapping[str, Any]", state)
        return {
            name
            for name in self._set.intersection(held)
            if any(self._is_made(leaf) for leaf in _leaves(held[name]))
        }

    def _is_made(self, leaf: Any) -> bool:
        known = self._made.get(id(leaf))
        return known is not None and known() is leaf

    @contextmanager
    def entered(self, state: Mapping[str, Any], unset: set[str], used: dict[str, str]) -> Generator[None]:
        """While a step is traced, `state` is what it was called with, of which `unset` are not set.

        used: is told the first phase that uses a state as it came in, by the state's name.
        """
        before = getattr(self._entered, "step", None)
        leaves = {id(leaf): name for name in self._set.intersection(state) for leaf in _leaves(state[name])}
        self._entered.step = leaves, unset, used
        try:
            yield
        finally:
            self._entered.step = before

    def check(self, phase: ir.Phase, state: Mapping[str, Any]) -> None:
        """Raise CP0824 where `phase` uses a state of `state` that nothing has set."""
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
            f"phase `{phase}` uses state `{name}` before `at start` has set it: it is still the zeros of"
            " run.init()",
            "call run.start(state, ...) first, and go on with the state that it returns, or with one that was"
            " saved",
            file=self._file,
        )


def _leaves(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree)
