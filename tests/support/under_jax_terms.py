"""The phases of a program under JAX, interpreted in terms (see `jaxpr_terms`)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from commplan.pytree import flatten

from .agreement import inputs_of
from .jaxpr_terms import interpret
from .plan_terms import InTerms
from .under_jax import UnderJax


def check_jax(plan: InTerms) -> int:
    """Interpret every phase as lowered for JAX; how many elements are as the plan means."""
    case, schedule = plan.case, plan.schedule
    runner = UnderJax(plan.ways.program, case.sizes, case.functions)
    state, count = runner.init(case.call), 0
    for phase in plan.ways.phases:
        inputs = inputs_of(schedule, phase, plan.inputs)
        values = {value.id: value for value in (*schedule.entry, *schedule.phase(phase).values)}
        arguments = runner._arguments(phase, values)
        shapes = {
            name: _shaped(tree, [leaf.dtype.numpy_name for leaf in arguments[name].leaves])
            for name, tree in inputs.items()
        }
        entry = {name: runner.entry[name] for name in state}
        states = {
            name: _shaped(tree, [leaf.dtype.numpy_name for leaf in entry[name].leaves])
            for name, tree in state.items()
        }
        closed, shape = jax.make_jaxpr(
            lambda s, i, phase=phase: runner.phase(phase, s, i), return_shape=True
        )(states, shapes)
        flat = [*jax.tree_util.tree_leaves(state), *jax.tree_util.tree_leaves(inputs)]
        results = interpret(closed, [np.asarray(x) for x in flat])
        structure = jax.tree_util.tree_structure(shape)
        outputs, state = jax.tree_util.tree_unflatten(structure, results)
        bound = {binding.name: values[binding.value] for binding in schedule.phase(phase).outputs}
        meant = plan.meaning[phase]
        if set(outputs) != set(plan.rounded[phase][0]) or not set(meant[1]) <= set(state):
            raise AssertionError(f"{phase}: outputs {sorted(outputs)}, states {sorted(state)}")
        for name in outputs:
            count += plan.check(phase, "output", name, outputs[name], bound[name])
        for name in meant[1]:
            count += plan.check(phase, "state", name, state[name], runner.entry[name])
    return count


def _shaped(tree: Any, dtypes: list[str]) -> Any:
    pairs, rebuild = flatten(tree)
    return rebuild(
        [jax.ShapeDtypeStruct(np.shape(x), dtype) for (_, x), dtype in zip(pairs, dtypes, strict=True)]
    )
