"""Which gradients a training step has made after which share of its computation, read from its trace.

While `marking`, phases of a program mark the leaves of their inputs, by an identity that XLA does not see.
The trace then tells which products each leaf depends on. Products count by their operations, all else as
nothing, in the order of the trace: the forward pass, then the backward pass from the last layer to the first.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from commplan.ir.schedule import Value
from commplan.lowering.jax import _compat
from commplan.lowering.jax.jaxprs import TracedProgram, called_by, evaluate_alone, inlined
from commplan.lowering.jax.pytree import Tree
from commplan.lowering.jax.typing_shim import ad_checkpoint, jax

Array = Any
Jaxpr = Any
_MARK = "commplan gradient "
_marking = ContextVar("_marking", default=False)


@contextmanager
def marking() -> Generator[None]:
    """Have phases that are traced inside mark the leaves of their inputs."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def mark(trees: Mapping[str, Tree], arguments: Mapping[str, Value]) -> Mapping[str, Tree]:
    """The inputs of a phase, their leaves marked by input and path while `marking`."""
    if not _marking.get():
        return trees
    return {name: tree.like(_marked(name, tree, arguments[name])) for name, tree in trees.items()}


def _marked(name: str, tree: Tree, value: Value) -> list[Array]:
    pairs = zip(tree.leaves, value.leaves, strict=True)
    return [ad_checkpoint.checkpoint_name(array, f"{_MARK}{name} {leaf.path}") for array, leaf in pairs]


@dataclass(frozen=True)
class GradientTimes:
    """The computation of a step until all gradients are made.

    shares: of the operations until then, by input and path of the leaf, in the order in which they are made.
    operations: of all products. program: of one rank, from its arguments to the gradients. arguments: their
    types.
    """

    shares: tuple[tuple[str, str, float], ...]
    operations: float
    program: TracedProgram
    arguments: tuple[Any, ...]

    def alone(self, *arguments: Array) -> list[Array]:
        """The gradients of a rank without its peers, for one device (see `evaluate_alone`)."""
        return evaluate_alone(self.program.jaxpr, self.program.consts, arguments)


def gradient_times(step: Any, arguments: Sequence[Any]) -> GradientTimes | None:
    """The gradients that `step`, traced for `arguments`, gives to phases inside of a shard_map; None if it
    gives none to any."""
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
        program = TracedProgram(body.replace(outvars=variables))
        used = program.used([True] * len(variables))
        kept = program.restricted([True] * len(variables), 0)
        types = tuple(var.aval for var, needed in zip(body.invars, used, strict=True) if needed)
        return GradientTimes(tuple(dict.fromkeys(shares)), end, kept, types)
    return None


def _name(text: str) -> tuple[str, str]:
    name, _, path = text.removeprefix(_MARK).partition(" ")
    return name, path


def _bodies(jaxpr: Jaxpr) -> Generator[Jaxpr]:
    """The bodies of the shard_maps of `jaxpr`, those in functions that it calls included."""
    for equation in jaxpr.eqns:
        for called, _ in called_by(equation):
            if equation.primitive.name == "shard_map":
                yield called
            else:
                yield from _bodies(called)


@dataclass
class _Walk:
    """Counts the operations of products in the order of a trace.

    done: so far. marks: text, variable, and operations until the last product that it depends on.
    """

    done: float = 0.0
    marks: list[tuple[str, Any, float]] = field(default_factory=list[tuple[str, Any, float]])

    def run(self, jaxpr: Jaxpr, times: Sequence[float]) -> list[float]:
        """When the results of `jaxpr` are made, given when its arguments are."""
        known: dict[Any, float] = dict(zip(jaxpr.invars, times, strict=True))

        def at(variable: Any) -> float:
            return 0.0 if hasattr(variable, "val") else known.get(variable, 0.0)

        for equation in jaxpr.eqns:
            reads = [at(variable) for variable in equation.invars]
            called = inlined(equation)
            if called is not None:
                results = self.run(called[0], reads)
            else:
                operations = _operations(equation)
                self.done += operations
                results = [self.done if operations else max(reads, default=0.0)] * len(equation.outvars)
            known.update(zip(equation.outvars, results, strict=True))
            text = str(equation.params.get("name", "")) if equation.primitive.name == "name" else ""
            if text.startswith(_MARK):
                self.marks.append((text, equation.outvars[0], results[0]))
        return [at(variable) for variable in jaxpr.outvars]


def _operations(equation: Any) -> float:
    """The operations of the products of `equation`, a multiplication and an addition counted as two; of a
    loop's body as often as it runs, if that is known."""
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        depth = math.prod(left[dimension] for dimension in contracted)
        return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        channels = equation.params["dimension_numbers"].rhs_spec[0]
        depth = math.prod(kernel) / max(1, kernel[channels])
        return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    inside = [sum(map(_operations, jaxpr.eqns)) for jaxpr, _ in called_by(equation)]
    times = equation.params["length"] if name == "scan" else 1
    return times * (max(inside, default=0.0) if name == "cond" else sum(inside))
