"""Estimates when the gradients of a training step become available, from its trace.

Inside `marking`, phases mark the leaves of their inputs with an identity that XLA does not see. The trace
then shows on which matrix products each leaf depends. Time is counted in operations of products, in the order
of the trace: the forward pass, then the backward pass from the last layer to the first. Other operations take
no time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array, ad_checkpoint

from commplan.ir.schedule import Value
from commplan.lowering.jax import _compat
from commplan.lowering.jax.jaxprs import Jaxpr, JaxprProgram, called_by, evaluate_alone, inlinable_call
from commplan.lowering.jax.pytree import Tree

_MARK = "commplan gradient "  # prefix of a mark's name, before the input and the path of the leaf
_marking = ContextVar("_marking", default=False)  # whether `marking` is active


@contextmanager
def marking() -> Generator[None]:
    """A context in which phases mark the leaves of their inputs when they are traced."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def mark(trees: Mapping[str, Tree], arguments: Mapping[str, Value]) -> Mapping[str, Tree]:
    """The inputs of a phase; inside `marking`, with each leaf marked by input and path.

    Args:
        trees: The inputs by name.
        arguments: The plan's values of the inputs by name.
    """
    if not _marking.get():
        return trees
    return {name: tree.like(_mark(name, tree, arguments[name])) for name, tree in trees.items()}


def _mark(name: str, tree: Tree, value: Value) -> list[Array]:
    pairs = zip(tree.leaves, value.leaves, strict=True)
    return [ad_checkpoint.checkpoint_name(array, f"{_MARK}{name} {leaf.path}") for array, leaf in pairs]


@dataclass(frozen=True)
class GradientTimes:
    """The computation of a step until all gradients are available.

    Attributes:
        shares: For each leaf, in order of availability: its input, its path, and the fraction of `operations`
            after which it is available.
        operations: The floating-point operations of all products up to the last that a gradient depends on.
        program: The program of one rank, from its arguments to the gradients.
        arguments: The types of its arguments, `jax.typeof` of each.
    """

    shares: tuple[tuple[str, str, float], ...]
    operations: float
    program: JaxprProgram
    arguments: tuple[Any, ...]

    def evaluate(self, *arguments: Array) -> list[Array]:
        """Compute the gradients of one rank on one device, without its peers (see `evaluate_alone`)."""
        return evaluate_alone(self.program.jaxpr, self.program.consts, arguments)


def gradient_times(step: Any, arguments: Sequence[Any]) -> GradientTimes | None:
    """The times of the gradients that `step` passes to phases inside of a shard_map.

    Args:
        step: A function, jitted or not.
        arguments: Its positional arguments, to trace it; values with a shape and dtype suffice.

    Returns:
        The times of the first shard_map in which a phase receives inputs; None if there is none.
    """
    with marking():
        jitted = step if hasattr(step, "trace") else jax.jit(step)
        traced, _ = _compat.jaxpr_and_constants(jitted.trace(*arguments).jaxpr)
    for body in _bodies(traced):
        walk = _Walk()
        walk.run(body, [0.0] * len(body.invars))
        if not walk.marks:
            continue
        end = max(time for _, _, time in walk.marks)
        shares = sorted(
            ((*_name(text), time / end if end else 1.0) for text, _, time in walk.marks),
            key=lambda share: share[2],
        )
        variables = [variable for _, variable, _ in walk.marks]
        program = JaxprProgram(body.replace(outvars=variables))
        used = program.used([True] * len(variables))
        restricted = program.restricted([True] * len(variables), 0)
        types = tuple(var.aval for var, needed in zip(body.invars, used, strict=True) if needed)
        return GradientTimes(tuple(dict.fromkeys(shares)), end, restricted, types)
    return None


def _name(text: str) -> tuple[str, str]:
    """The input and the path of a mark."""
    name, _, path = text.removeprefix(_MARK).partition(" ")
    return name, path


def _bodies(jaxpr: Jaxpr) -> Generator[Jaxpr]:
    """The bodies of the shard_maps of `jaxpr`, including those in called functions."""
    for equation in jaxpr.eqns:
        for called, _ in called_by(equation):
            if equation.primitive.name == "shard_map":
                yield called
            else:
                yield from _bodies(called)


@dataclass
class _Walk:
    """Counts the operations of products in trace order.

    Attributes:
        done: The operations of all products so far.
        marks: For each mark, its text, its variable, and `done` after the last product that it depends on.
    """

    done: float = 0.0
    marks: list[tuple[str, Any, float]] = field(default_factory=list[tuple[str, Any, float]])

    def run(self, jaxpr: Jaxpr, times: Sequence[float]) -> list[float]:
        """The times of the results of `jaxpr`, from the times of its arguments.

        The time of a value is `done` after the last product that it depends on; 0 if it depends on none.
        """
        time_of: dict[Any, float] = dict(zip(jaxpr.invars, times, strict=True))

        def when(variable: Any) -> float:
            return 0.0 if hasattr(variable, "val") else time_of.get(variable, 0.0)

        for equation in jaxpr.eqns:
            reads = [when(variable) for variable in equation.invars]
            called = inlinable_call(equation)
            if called is not None:
                results = self.run(called[0], reads)
            else:
                operations = _operations(equation)
                self.done += operations
                results = [self.done if operations else max(reads, default=0.0)] * len(equation.outvars)
            time_of.update(zip(equation.outvars, results, strict=True))
            text = str(equation.params.get("name", "")) if equation.primitive.name == "name" else ""
            if text.startswith(_MARK):
                self.marks.append((text, equation.outvars[0], results[0]))
        return [when(variable) for variable in jaxpr.outvars]


def _operations(equation: Any) -> float:
    """The operations of the products of `equation`; a multiply-add counts as two.

    The body of a scan is counted as often as it runs.
    """
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        operand_shape = equation.invars[0].aval.shape
        depth = math.prod(operand_shape[dimension] for dimension in contracted)
        return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        channels = equation.params["dimension_numbers"].rhs_spec[0]
        depth = math.prod(kernel) / max(1, kernel[channels])
        return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    inside = [sum(map(_operations, jaxpr.eqns)) for jaxpr, _ in called_by(equation)]
    times = equation.params["length"] if name == "scan" else 1
    return times * (max(inside, default=0.0) if name == "cond" else sum(inside))
