"""Analyzes, reduces and evaluates functions that are traced to jaxprs.

`layers.vjp` splits derivatives with it, and `gradient_times` evaluates a step on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax

from commplan.lowering.collective_primitives import collective_kind
from commplan.lowering.jax import _compat

Jaxpr = Any
# Primitives by prefix of their name; the rest of the name differs between versions of JAX.
# Those that call a function once on their operands:
_CALLS = (
    "jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call",
)  # fmt: skip
# Those that change only the axes over which JAX types a value as varying:
_TYPES_ONLY = ("pvary", "pcast")


@dataclass(frozen=True)
class JaxprProgram:
    """A jaxpr with its constants. Calling it with the arguments evaluates it and returns the results.

    Attributes:
        jaxpr: The jaxpr.
        consts: The values of its constant variables, in order; empty if it has none.
    """

    jaxpr: Jaxpr
    consts: tuple[Array, ...] = ()

    def __call__(self, *arguments: Array) -> list[Array]:
        return list(jax.core.eval_jaxpr(self.jaxpr, self.consts, *arguments))

    @property
    def result_avals(self) -> tuple[Any, ...]:
        """The types of the results, `jax.typeof` of each."""
        return tuple(var.aval for var in self.jaxpr.outvars)

    @property
    def hoisted(self) -> JaxprProgram:
        """The program with its constants as first arguments."""
        return JaxprProgram(_compat.with_constants_as_arguments(self.jaxpr))

    def used(self, results: Sequence[bool]) -> list[bool]:
        """For each argument, whether the selected results depend on it."""
        return _compat.without_dead_code(self.jaxpr, results, [False] * len(self.jaxpr.invars))[1]

    def restricted(self, results: Sequence[bool], count: int) -> JaxprProgram:
        """The program without unneeded results and arguments.

        Args:
            results: For each result, whether it is kept.
            count: The number of leading arguments that are kept even if no result needs them.
        """
        required = [number < count for number in range(len(self.jaxpr.invars))]
        return JaxprProgram(_compat.without_dead_code(self.jaxpr, results, required)[0], self.consts)


def trace(function: Callable[..., Any], *arguments: Array) -> JaxprProgram:
    """Trace `function` to a program. Arrays that it closes over become constants."""
    return JaxprProgram(*_compat.jaxpr_and_constants(jax.make_jaxpr(function)(*arguments)))


def called_by(equation: Any) -> Iterator[tuple[Jaxpr, tuple[Array, ...]]]:
    """The jaxprs in the parameters of `equation` (branches, bodies, functions), each with its constants."""
    for value in equation.params.values():
        for entry in cast("Sequence[Any]", value) if isinstance(value, tuple | list) else (value,):
            jaxpr, consts = _compat.jaxpr_and_constants(entry)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr, consts


def inlinable_call(equation: Any) -> tuple[Jaxpr, tuple[Array, ...]] | None:
    """The function that `equation` calls exactly once on its operands, and its constants.

    None for other equations, such as loops, and if the function takes other operands.
    """
    called = next(called_by(equation), None)
    fits = called is not None and len(called[0].invars) == len(equation.invars)
    return called if fits and equation.primitive.name.startswith(_CALLS) else None


def evaluate_alone(jaxpr: Jaxpr, consts: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """Evaluate the body of a shard_map as if its rank had no peers, outside of any mesh.

    A collective returns its operand, or zeros if the shape of its result differs; `axis_index` returns 0.

    Args:
        jaxpr: The body.
        consts: The values of its constant variables.
        arguments: The arguments of one rank.

    Returns:
        The results of one rank.
    """
    values: dict[Any, Array] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True)
    )

    def read(variable: Any) -> Array:
        return variable.val if hasattr(variable, "val") else values[variable]

    for equation in jaxpr.eqns:
        results = _evaluate_equation(equation, [read(variable) for variable in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _evaluate_equation(equation: Any, operands: list[Array]) -> Sequence[Array]:
    """Evaluate an equation on one rank. Collectives return their operands."""
    name, params = equation.primitive.name, equation.params
    called = inlinable_call(equation)
    if called is not None:
        return evaluate_alone(*called, operands)
    if name.startswith(_TYPES_ONLY):
        return operands
    if collective_kind(name) is not None or name == "axis_index":
        avals = [variable.aval for variable in equation.outvars]
        # `axis_index` has no operands, and a ragged all-to-all has also offsets and sizes.
        return [_substitute(aval, operand) for aval, operand in zip_longest(avals, operands[: len(avals)])]
    if name == "scan":
        return _scan_alone(params, operands)
    if name == "cond":
        branches = map(_compat.jaxpr_and_constants, params["branches"])
        bodies = [partial(evaluate_alone, *branch) for branch in branches]
        return lax.switch(operands[0], bodies, operands[1:])
    if name == "while":
        return _while_alone(params, operands)
    results = equation.primitive.bind(*operands, **params)
    return results if equation.primitive.multiple_results else [results]


def _substitute(aval: Any, operand: Array | None) -> Array:
    """The operand if it has the shape of the result, otherwise zeros."""
    if operand is not None and operand.shape == aval.shape:
        return operand
    return jnp.zeros(aval.shape, aval.dtype)


def _scan_alone(params: dict[str, Any], operands: list[Array]) -> list[Array]:
    """Evaluate a `scan` on one rank. Its operands are constants, carried values, and stacked slices."""
    body, consts = _compat.jaxpr_and_constants(params["jaxpr"])
    const_count, carry_count = _compat.scan_operands(params)
    carry_end = const_count + carry_count

    def step(carry: list[Array], slices: list[Array]) -> tuple[list[Array], list[Array]]:
        results = evaluate_alone(body, consts, [*operands[:const_count], *carry, *slices])
        return results[:carry_count], results[carry_count:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = lax.scan(step, operands[const_count:carry_end], operands[carry_end:], **options)
    return [*last, *stacked]


def _while_alone(params: dict[str, Any], operands: list[Array]) -> list[Array]:
    """Evaluate a `while` on one rank. Its operands are the constants of both functions, and the state."""
    condition, body = (_compat.jaxpr_and_constants(params[f"{part}_jaxpr"]) for part in ("cond", "body"))
    body_start = params["cond_nconsts"]
    carry_start = body_start + params["body_nconsts"]

    def condition_holds(state: list[Array]) -> Array:
        return evaluate_alone(*condition, [*operands[:body_start], *state])[0]

    def iterate(state: list[Array]) -> list[Array]:
        return evaluate_alone(*body, [*operands[body_start:carry_start], *state])

    return lax.while_loop(condition_holds, iterate, operands[carry_start:])
