"""Which operations made a traced value. Like `_compat`, this is where private names of JAX are touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from jax._src import core as _src_core
from jax._src import source_info_util as _src_source_info_util

_core, _source_info = cast("Any", _src_core), cast("Any", _src_source_info_util)
_SUMS = ("psum", "pmax", "pmin", "all_gather", "unreduced_psum", "commplan_same")
_PLANNED = re.compile(r"commplan/([^/()]+)/line(\d+)")


@dataclass(frozen=True)
class TracedReduction:
    """A collective that made a value the same on all ranks.

    phase, line: of the plan, if a phase did it. source: `file:line (function)` of the program. is_derivative:
    whether JAX did it, in the backward pass of `jax.grad`.
    """

    phase: str = ""
    line: int = 0
    source: str = ""
    is_derivative: bool = False


@dataclass
class Lineage:
    """The values that a traced value is made of.

    has_inputs, has_constants: whether arguments of the traced function, or constants, are among them. marked:
    the values for which `is_marked` is true.
    """

    has_inputs: bool = False
    has_constants: bool = False
    reductions: list[TracedReduction] = field(default_factory=list[TracedReduction])
    marked: list[Any] = field(default_factory=list[Any])

    @property
    def is_constant(self) -> bool:
        """Whether nothing but constants went into it."""
        return not (self.has_inputs or self.reductions or self.marked)


def lineage(x: Any, is_marked: Callable[[Any], bool] | None = None) -> Lineage:
    """The values that `x` is made of, back to arguments, constants and the last collective on each way.

    is_marked: the search ends at values for which this is true. It ends altogether at the first argument or
    constant: `x` is then not made of marked values alone, and a gradient may be made of a whole model.
    """
    result, pending, seen = Lineage(), [x], set[int]()
    while pending and not (is_marked and (result.has_inputs or result.has_constants)):
        value = pending.pop()
        if is_marked and is_marked(value):
            result.marked.append(value)
            continue
        tracer = _recorded(value)
        if tracer is None:
            result.has_constants = True
            continue
        if id(tracer) in seen:
            continue
        seen.add(id(tracer))
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


def _recorded(value: Any) -> Any:
    """The recorded tracer inside those of derivatives and of vmap; None if `value` is no tracer."""
    while isinstance(value, _core.Tracer) and not hasattr(value, "parent"):
        inner = getattr(value, "primal", getattr(value, "val", None))
        if inner is None:
            return value
        value = inner
    return value if isinstance(value, _core.Tracer) else None


def _constant(tracer: Any) -> Any:
    """The array or outer tracer that a function which is traced closes over; None for its arguments."""
    return tracer._trace.frame.constvar_to_val.get(tracer.val)


def _reductions(equation: Any, info: Any) -> Iterator[TracedReduction]:
    """The collectives of `equation`, those of functions that it calls included."""
    if equation.primitive.name.startswith(_SUMS):
        stack = str(info.name_stack)
        planned = _PLANNED.search(stack)
        phase, line = (planned[1], int(planned[2])) if planned else ("", 0)
        yield TracedReduction(phase, line, _source_info.summarize(info), "transpose(" in stack)
    for sub in _core.jaxprs_in_params(equation.params):
        for inner in sub.eqns:
            yield from _reductions(inner, inner.source_info)
