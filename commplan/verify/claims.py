"""Properties of a schedule that are proved, assumed or not checked, as shown by `verify` and `explain`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from commplan.diagnostics import plural
from commplan.ir.analysis.server_ops import server_op
from commplan.ir.schedule import Collective, Encode, Exchange, Map, Schedule


class Claims(msgspec.Struct, frozen=True):
    """Claims about a schedule that passed verification.

    Attributes:
        proved: the property that was proved.
        assumed: assumptions of the proof; empty if there are none.
        not_checked: properties that the verifier does not consider.
    """

    proved: str
    assumed: tuple[str, ...]
    not_checked: tuple[str, ...]

    def lines(self) -> list[str]:
        """One line for each nonempty category, such as `proved: ..`."""
        words = {"proved": (self.proved,), "assumed": self.assumed, "not checked": self.not_checked}
        return [f"{word}: {'; '.join(texts)}" for word, texts in words.items() if texts]


def claims(schedule: Schedule) -> Claims:
    """Collect the claims about `schedule`, which must have passed `verify`."""
    unchecked = ("the results of functions", "the rounding of sums in another order")
    if any(isinstance(op, Encode) for phase in schedule.phases for op in phase.ops):
        unchecked = (*unchecked, "which values of a block format share a scale")
    if schedule.origin is None:
        proved = "consistent, but not compared with a plan"
        return Claims(
            proved, tuple(_assumptions(schedule)), ("whether it is equivalent to a plan", *unchecked)
        )
    outputs = sum(len(phase.outputs) for phase in schedule.phases)
    states = sum(len(phase.updates) for phase in schedule.phases)
    counts = (plural(outputs, "output"), plural(states, "state"), plural(len(schedule.phases), "phase"))
    proved = "equivalent to its plan: {} and {} of {}".format(*counts)
    return Claims(proved, tuple(_assumptions(schedule)), unchecked)


def _assumptions(schedule: Schedule) -> Iterator[str]:
    """Assumptions about native collectives, user functions and their declared properties, and servers."""
    ops = [op for phase in schedule.phases for op in phase.ops]
    native: dict[str, dict[int, None]] = {}  # plan lines, without duplicates, by kind and axes
    for op in (op for op in ops if isinstance(op, Collective)):
        if "native" in (op.algorithm.name, *(algorithm.name for _, algorithm in op.algorithm.levels)):
            native.setdefault(f"{op.kind} over {', '.join(op.axes)}", {})[op.span.line] = None
    if native:
        lines = (
            f"{title} (line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))})"
            for title, numbers in native.items()
        )
        yield f"the backend's own collectives: {', '.join(lines)}"
    called_names = {op.fn for op in ops if isinstance(op, Map | Exchange)}
    called_fns = [fn for fn in schedule.fns if fn.name in called_names and fn.body is None]
    if called_fns:
        names = ", ".join(f"`{fn.name}`" for fn in called_fns)
        yield f"the functions bound are those that the plan names: {names}"
    declared = schedule.origin.plan.fns if schedule.origin is not None else schedule.fns
    for word in ("elementwise", "linear"):
        names = ", ".join(
            f"`{fn.name}`"
            for fn in declared
            if fn.name in called_names and fn.body is None and getattr(fn, word, False)
        )
        if names:
            yield f"{word} as declared: {names}"
    random = ", ".join(f"`{fn.name}`" for fn in called_fns if fn.random)
    if random:
        yield f"random functions draw only from the key that they receive: {random}"
    cached = dict.fromkeys(f"`{op.fn}`" for op in ops if isinstance(op, Map) and op.hints.cache)
    if cached:
        yield f"functions with a cache return the same for a record each time: {', '.join(cached)}"
    values = schedule.values
    if any(server_op(op, values) for op in ops):
        yield "servers follow their protocol"
        yield "answers of servers depend on messages of workers alone"
