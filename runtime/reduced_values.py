"""Values that phases have returned as reduced, for machines without such types.

Inside a shard_map JAX types values by the axes over which they vary. Ranks of a communicator, and a shard_map
with `check_vma=False`, have no such types. There the arrays and tracers themselves are recorded.
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
    """The axes over which a value is the same, and the reduction that produced it."""

    axes: frozenset[str]
    reduction: TracedReduction


_marks = ByIdentity[_Mark]()


def record(value: ir.Value, tree: Any, axes: Sequence[str], phase: ir.Phase) -> None:
    """Record that `phase` returned `tree` for `value`.

    Args:
        axes: The plan's axes of more than one rank.
    """
    line = next((op.span.line for op in phase.ops if value.id in ir.results(op)), phase.span.line)
    for leaf, x in zip(value.leaves, flatten(tree)[1].leaves, strict=True):
        same = frozenset(axes).difference(varying(value, leaf))
        if same:
            _marks[x] = _Mark(same, TracedReduction(phase.name, line))


def check_terms(
    inputs: Mapping[str, Any], values: Mapping[str, ir.Value], axes: Sequence[str], span: Span, file: str
) -> None:
    """Raise CP0807 for a partial input that consists only of values that phases have reduced."""
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
