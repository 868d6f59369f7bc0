"""The collectives that a traced function issues, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from commplan.ir.types import DType
from commplan.lowering.jax.jaxprs import called_by

# By the beginnings of their names in JAX, which differ between versions in what follows.
_KINDS = {
    "psum_scatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "psum": "all_reduce(sum)",
    "pmax": "all_reduce(max)",
    "pmin": "all_reduce(min)",
    "all_gather": "all_gather",
    "_all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "permute",
    "psend": "send",
    "precv": "receive",
}


class TracedOperation(NamedTuple):
    """An operation of a trace. scope: JAX's name of its place. loops: loops and branches around it."""

    equation: Any
    scope: str
    loops: str


def equations(jaxpr: Any, scope: str = "", loops: str = "") -> Iterator[TracedOperation]:
    """The operations of `jaxpr` and of all that it calls; those of a loop's body once, of all branches."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = f"{scope}/{equation.source_info.name_stack}".strip("/")
        yield TracedOperation(equation, inner, loops)
        within = f"{loops}, in {name}" if name in ("scan", "while", "cond") else loops
        within += f" of length {equation.params['length']}" if name == "scan" else ""
        for called, _ in called_by(equation):
            yield from equations(called, inner, within)


def collectives_of(jaxpr: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Text and scope of the collectives of `jaxpr` over axes with more than one place."""
    for equation, scope, loops in equations(jaxpr):
        name = equation.primitive.name
        kind = next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), None)
        named: Any = equation.params.get("axes", equation.params.get("axis_name", ()))
        names = cast("Sequence[Any]", named if isinstance(named, list | tuple) else (named,))
        axes = [str(axis) for axis in names if axis in sizes]
        if kind is not None and any(sizes[axis] > 1 for axis in axes):
            operands = ", ".join(typed(str(x.aval.dtype), x.aval.shape) for x in equation.invars)
            yield f"{kind} {operands} over {', '.join(axes)}{loops}", scope


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    """Type and shape of an array, in a few letters: `f32[8,3]`."""
    return f"{DType.from_name(dtype) or dtype}[{','.join(map(str, shape))}]"
