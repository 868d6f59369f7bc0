"""From a checked plan to a schedule: sizes and shapes bound, lowered, rewritten by the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commplan.ir.plan import Plan
from commplan.ir.schedule import Leaf, Schedule
from commplan.passes.axes import bind_axes
from commplan.passes.lower import lower
from commplan.passes.shapes import infer


def compile_plan(
    plan: Plan,
    sizes: Mapping[str, int],
    shapes: Mapping[str, tuple[Leaf, ...]],
    *,
    topology: object = None,
    mapping: Mapping[str, str] | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
    pipeline: str | None = None,
    observer: object = None,
) -> Schedule:
    """The schedule of `plan` on axes of `sizes`."""
    axes = bind_axes(plan, sizes)
    values = infer(plan, {axis.name: axis.size for axis in axes}, shapes)
    return lower(plan, axes, values)
