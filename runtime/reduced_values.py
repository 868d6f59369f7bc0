"""Record which values phases have reduced, if JAX's types do not contain it.

Inside a shard_map JAX types values by the axes over which they vary. Ranks of a communicator, and a shard_map
with `check_vma=False`, have no such types. In these cases `record` stores the arrays and tracers that a phase
returns, and `check_terms` refuses to reduce them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from commplan.diagnostics import Span
from commplan.ir import schedule as ir
from commplan.lowering.jax._lineage import TracedReduction, lineage
from commplan.lowering.jax.check import refuse_reduced
from commplan.lowering.jax.layout import varying
from commplan.lowering.jax.pytree import flatten
from commplan.runtime.context.identity import ByIdentity


class _Mark(NamedTuple):
    """A leaf that a phase returned.

    Attributes:
        axes: The axes over which it is the same, at least one.
        reduction: The phase and the line of the plan that returned it, for errors.
    """

    axes: frozenset[str]
    reduction: TracedReduction


_marks = ByIdentity[_Mark]()  # By leaf. An entry ends with its array or tracer.


def record(value: ir.Value, tree: Any, axes: Sequence[str], phase: ir.Phase) -> None:
    """Record that `phase` returned `tree` for `value`.

    Args:
        value: An output of the phase.
        tree: Its arrays or tracers, a pytree.
        axes: The plan's axes of more than one rank.
        phase: The phase.
    """
    # The op that made the value has the line; an input that is returned unchanged has none.
    line = next((op.span.line for op in phase.ops if value.id in ir.results(op)), phase.span.line)
    for leaf, x in zip(value.leaves, flatten(tree)[1].leaves, strict=True):
        same = frozenset(axes).difference(varying(value, leaf))
        if same:
            _marks[x] = _Mark(same, TracedReduction(phase.name, line))


def check_terms(
    inputs: Mapping[str, Any], values: Mapping[str, ir.Value], axes: Sequence[str], span: Span, file: str
) -> None:
    """Refuse to reduce a value over an axis twice.

    Args:
        inputs: The inputs of the phase, as pytrees by name.
        values: The values of the schedule for these names.
        axes: The plan's axes of more than one rank.
        span: The line of the phase, for errors.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0807 for a leaf of a partial input that was computed only from recorded values, if
            all of these are the same over one of its partial axes.
    """
    for name, value in values.items():
        over = [axis for axis in value.placement.partial if axis in axes]
        if not over or not _marks:
            continue
        for path, x in zip(*_leaves(inputs[name]), strict=True):
            origin = lineage(x, lambda each: _marks.get(each) is not None)
            if origin.has_inputs or origin.has_constants or not origin.marked:
                continue
            marks = [mark for each in origin.marked if (mark := _marks.get(each)) is not None]
            summed = [axis for axis in over if all(axis in mark.axes for mark in marks)]
            if summed:
                where = f" at `{path}`" if path else ""
                refuse_reduced(f"`{name}`{where}", summed, [mark.reduction for mark in marks], span, file)


def _leaves(tree: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    paths, flat = flatten(tree)
    return paths, flat.leaves
