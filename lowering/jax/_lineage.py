"""Finds the arguments, constants and collectives that a traced value depends on.

`check` uses it to explain why a value is the same on all ranks. Like `_compat`, it uses private names of JAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from jax._src import core as _src_core
from jax._src import source_info_util as _src_source_info_util

from commplan.lowering.collective_primitives import is_replicating

_core, _source_info = cast("Any", _src_core), cast("Any", _src_source_info_util)
_PLANNED = re.compile(r"commplan/([^/()]+)/line(\d+)")  # the name scope of an op of a phase


@dataclass(frozen=True)
class TracedReduction:
    """A collective whose result is the same on all ranks.

    Attributes:
        phase: The phase of the plan that contains it; empty if no phase does.
        line: The line of the plan; 0 if no phase contains it.
        source: `file:line (function)` in the user's program.
        is_derivative: Whether JAX inserted it in the backward pass of `jax.grad`.
    """

    phase: str = ""
    line: int = 0
    source: str = ""
    is_derivative: bool = False


@dataclass
class Lineage:
    """The values that a traced value depends on.

    Attributes:
        has_inputs: Whether arguments of the traced function are among them.
        has_constants: Whether constants are among them.
        reductions: The last collective on each path that has one; operands of these are not searched.
        marked: The values for which `is_marked` of `lineage` is true.
    """

    has_inputs: bool = False
    has_constants: bool = False
    reductions: list[TracedReduction] = field(default_factory=list[TracedReduction])
    marked: list[Any] = field(default_factory=list[Any])

    @property
    def is_constant(self) -> bool:
        """Whether it depends only on constants."""
        return not (self.has_inputs or self.reductions or self.marked)


def lineage(x: Any, is_marked: Callable[[Any], bool] | None = None) -> Lineage:
    """The values that `x` depends on, back to arguments, constants and the last collective on each path.

    Args:
        x: A value in a trace, or an array, which counts as a constant.
        is_marked: The search does not continue behind values for which this is true. With it, the search ends
            at the first argument or constant, because a gradient may depend on a whole model. None marks no
            value.
    """
    result = Lineage()
    pending = [x]
    visited: set[int] = set()
    while pending and not (is_marked and (result.has_inputs or result.has_constants)):
        value = pending.pop()
        if is_marked and is_marked(value):
            result.marked.append(value)
            continue
        tracer = _recorded_tracer(value)
        if tracer is None:
            result.has_constants = True
            continue
        if id(tracer) in visited:
            continue
        visited.add(id(tracer))
        if is_marked and tracer is not value and is_marked(tracer):
            result.marked.append(tracer)
        elif not hasattr(tracer, "parent"):
            result.has_inputs = True
        elif tracer.parent is not None:
            reductions = list(_reductions(tracer.parent, tracer.parent.source_info))
            result.reductions += reductions
            pending += [] if reductions else tracer.parent.in_tracers
        elif hasattr(tracer.val, "val"):  # a literal
            result.has_constants = True
        elif (constant := _constant(tracer)) is not None:
            pending.append(constant)
        else:
            result.has_inputs = True
    return result


def _recorded_tracer(value: Any) -> Any:
    """The recorded tracer inside tracers of derivatives and vmap; None if `value` is not a tracer."""
    while isinstance(value, _core.Tracer) and not hasattr(value, "parent"):
        inner = getattr(value, "primal", getattr(value, "val", None))
        if inner is None:
            return value
        value = inner
    return value if isinstance(value, _core.Tracer) else None


def _constant(tracer: Any) -> Any:
    """The array or outer tracer that the traced function closes over; None for its arguments."""
    return tracer._trace.frame.constvar_to_val.get(tracer.val)


def _reductions(equation: Any, info: Any) -> Iterator[TracedReduction]:
    """The replicating collectives of `equation`, including those of functions that it calls.

    `info` is the source information of the equation.
    """
    name = equation.primitive.name
    if is_replicating(name) or name == "commplan_same":
        stack = str(info.name_stack)
        planned = _PLANNED.search(stack)
        phase, line = (planned[1], int(planned[2])) if planned else ("", 0)
        yield TracedReduction(phase, line, _source_info.summarize(info), "transpose(" in stack)
    for sub in _core.jaxprs_in_params(equation.params):
        for inner in sub.eqns:
            yield from _reductions(inner, inner.source_info)
