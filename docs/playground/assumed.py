"""Default values of the playground: sizes of axes and shapes of trees."""

from __future__ import annotations

from typing import Any

from commplan.ir.plan import Plan
from commplan.ir.types import TreeType

SIZE = 4  # of an axis that is bound when the plan is compiled
LAYERS = {"layer_0": ([784, 256], [256]), "layer_1": ([256, 16], [16])}


def sizes(plan: Plan) -> dict[str, int]:
    """Of the axes that the plan leaves open, by name."""
    return {axis.name: SIZE for axis in plan.axes if axis.size is None}


def shapes(plan: Plan) -> dict[str, Any]:
    """Two layers of a small network for each tree that is an input or a state, by name."""
    values = [plan.value(ref) for ref in (*plan.inputs, *plan.states)]
    return {value.name: _layers() for value in values if isinstance(value.type, TreeType)}


def _layers() -> dict[str, Any]:
    leaf = lambda shape: {"shape": shape, "dtype": "f32"}  # noqa: E731
    return {name: {"w": leaf(weight), "b": leaf(bias)} for name, (weight, bias) in LAYERS.items()}
