"""Functions traced to jaxprs, to split them or to look into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from commplan.lowering.jax import _compat
from commplan.lowering.jax.typing_shim import jax

Array = Any
Jaxpr = Any


@dataclass(frozen=True)
class Program:
    """A jaxpr with its constants: `program(*arguments)` evaluates it. types: of its results."""

    jaxpr: Jaxpr
    consts: tuple[Array, ...] = ()

    def __call__(self, *arguments: Array) -> list[Array]:
        return list(jax.core.eval_jaxpr(self.jaxpr, self.consts, *arguments))

    @property
    def types(self) -> tuple[Any, ...]:
        return tuple(var.aval for var in self.jaxpr.outvars)

    @property
    def hoisted(self) -> Program:
        """The program that takes its constants as its first arguments."""
        return Program(_compat.with_constants_as_arguments(self.jaxpr))

    def used(self, results: Sequence[bool]) -> list[bool]:
        """Which arguments those of `results` that are true depend on."""
        return _compat.without_dead_code(self.jaxpr, results, [False] * len(self.jaxpr.invars))[1]

    def restricted(self, results: Sequence[bool], count: int) -> Program:
        """The program of the first `count` arguments that gives these results, which need no others."""
        required = [number < count for number in range(len(self.jaxpr.invars))]
        return Program(_compat.without_dead_code(self.jaxpr, results, required)[0], self.consts)


def traced(function: Callable[..., Any], *arguments: Array) -> Program:
    """`function` as a program. The arrays that it closes over are its constants."""
    return Program(*_compat.jaxpr_and_constants(jax.make_jaxpr(function)(*arguments)))


def called_by(equation: Any) -> Iterator[tuple[Jaxpr, tuple[Array, ...]]]:
    """The jaxprs among the parameters of `equation` (branches, bodies of loops, functions), each with its
    constants."""
    for value in equation.params.values():
        for entry in cast("Sequence[Any]", value) if isinstance(value, tuple | list) else (value,):
            jaxpr, consts = _compat.jaxpr_and_constants(entry)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr, consts
