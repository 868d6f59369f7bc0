"""Lists the operations and the collectives of a traced function, before it is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from commplan.ir.types import DType
from commplan.lowering.collective_primitives import GROUPED, collective_kind
from commplan.lowering.jax.jaxprs import called_by


class ListedEquation(NamedTuple):
    """An operation of a trace.

    Attributes:
        equation: The equation of the jaxpr.
        scope: Its JAX name scope, such as `layer/attention`; empty if it has none.
        loops: The loops and branches around it, as text such as `, in scan of length 4`; empty if none.
    """

    equation: Any
    scope: str
    loops: str


def equations(jaxpr: Any, scope: str = "", loops: str = "") -> Iterator[ListedEquation]:
    """The operations of `jaxpr` and of jaxprs in it: loop bodies once, all branches of conditionals.

    Args:
        jaxpr: The jaxpr.
        scope: The name scope around it.
        loops: The loops and branches around it, as in `ListedEquation`.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = f"{scope}/{equation.source_info.name_stack}".strip("/")
        yield ListedEquation(equation, inner, loops)
        surrounding = f"{loops}, in {name}" if name in ("scan", "while", "cond") else loops
        surrounding += f" of length {equation.params['length']}" if name == "scan" else ""
        for called, _ in called_by(equation):
            yield from equations(called, inner, surrounding)


def collectives_of(jaxpr: Any, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Text and name scope of the collectives of `jaxpr` over axes with more than one rank.

    Args:
        jaxpr: The jaxpr.
        sizes: The sizes of the axes. Collectives over other axes only are not listed.
    """
    for equation, scope, loops in equations(jaxpr):
        name, params = equation.primitive.name, equation.params
        kind, within = collective_kind(name), ""
        if kind is None or name.endswith("_done"):  # listed at its start
            continue
        if name == GROUPED:
            kind = "broadcast" if params["kind"] == "broadcast" else f"{kind}({params['kind']})"
            first = params["groups"][0]
            within = f" in groups of {len(first)}, the first with {', '.join(map(str, first[:2]))}"
        parameter: Any = params.get("axes", params.get("axis_name", ()))
        names = cast("Sequence[Any]", parameter if isinstance(parameter, list | tuple) else (parameter,))
        axes = [str(axis) for axis in names if axis in sizes]
        if any(sizes[axis] > 1 for axis in axes):
            operands = ", ".join(typed(str(x.aval.dtype), x.aval.shape) for x in equation.invars)
            yield f"{kind} {operands} over {', '.join(axes)}{within}{loops}", scope


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    """Dtype and shape of an array as in `f32[8,3]`."""
    return f"{DType.from_name(dtype) or dtype}[{','.join(map(str, shape))}]"
