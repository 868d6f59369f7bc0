"""The phases of a program on the ranks of a small MPI world, in terms (see `engine_terms`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from msgspec.structs import replace

from commplan.ir.plan import name_of
from commplan.lowering.jax.execution import CallContext
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import flatten as flatten_jax
from commplan.lowering.mpi import backend as mpi_backend
from commplan.lowering.mpi import build, collectives
from commplan.lowering.mpi.job.groups import Groups
from commplan.lowering.programs import spreads
from commplan.pytree import flatten, nest

from .agreement import inputs_of
from .engine_terms import Comm, Library, World
from .jaxpr_terms import Walker, in_step
from .oracle.layout import Grid, spread
from .plan_terms import InTerms
from .terms import Array, lift


def in_form(plan: InTerms, form: str) -> Any:
    """The schedule with its collectives in `form`, `call` or `split`; as compiled for "usual"."""
    schedule = replace(plan.schedule, backend="mpi")
    if form == "usual":
        return schedule
    phases = [
        replace(phase, ops=tuple(replace(op, form=form) if hasattr(op, "form") else op for op in phase.ops))
        for phase in schedule.phases
    ]
    return replace(schedule, phases=tuple(phases))


def check_mpi(plan: InTerms, form: str = "usual") -> int:
    """Lower every phase for every rank, and execute the engine's tables; returns the number of correct
    elements."""
    schedule = in_form(plan, form)
    grid = Grid(schedule)
    libraries: list[Library] = []
    backends: list[Any] = []
    with mock.patch.object(Groups, "concurrent", new=True):
        for rank in range(len(grid.ranks)):
            groups: dict[int, tuple[int, ...]] = {}
            libraries.append(Library(groups))
            with mock.patch.object(build, "library", lambda: libraries[-1]):
                channel = collectives.Channel(Comm(rank, len(grid.ranks), groups), schedule.mesh_sizes)
            backends.append(
                mpi_backend.MpiBackend(schedule.mesh_sizes, channel, spreads(schedule), schedule.file)
            )
        try:
            return _check(plan, schedule, grid, World(libraries), backends)
        finally:
            for backend in backends:
                backend.channel.close()


def _check(plan: InTerms, schedule: Any, grid: Grid, world: World, backends: Sequence[Any]) -> int:
    entry = {name_of(value.id): value for value in schedule.entry}
    states: list[dict[str, Any]] = [{} for _ in backends]
    for ref in schedule.states:
        value = entry[name_of(ref)]
        zeros = [lift(np.zeros(leaf.shape, int), leaf.dtype.numpy_name) for leaf in value.leaves]
        tree = _rebuilt(plan, value, zeros)
        for state in states:
            state[name_of(ref)] = tree
    count = 0
    for phase in plan.ways.phases:
        compiled = schedule.phase(phase)
        inputs = inputs_of(schedule, phase, plan.inputs)
        lowered = [
            Lowered(schedule, compiled, plan.case.functions, backend, plan.ways.program.structures)
            for backend in backends
        ]
        walks: list[Any] = []
        shapes: list[Any] = []
        for program, at, state in zip(lowered, grid.ranks, states, strict=True):
            mine = {name: _own(grid, program.arguments[name], tree, at) for name, tree in inputs.items()}
            closed, shape = _traced(program, mine, state, plan.case.call)
            flat = [*jax.tree_util.tree_leaves(mine), *jax.tree_util.tree_leaves(state)]
            walks.append(Walker({}, {}).walk(closed.jaxpr, closed.consts, flat))
            shapes.append(jax.tree_util.tree_structure(shape))
        ends = in_step(walks, world.together)
        if world.begun:
            raise AssertionError(f"{phase}: {len(world.begun)} collectives are begun and never finished")
        bound = {b.name: lowered[0].values[b.value] for b in compiled.outputs}
        for number, (end, structure) in enumerate(zip(ends, shapes, strict=True)):
            outputs, new = jax.tree_util.tree_unflatten(structure, end)
            states[number] = states[number] | new
            part = functools.partial(_cut, grid, grid.ranks[number])
            if set(outputs) != set(plan.rounded[phase][0]) or not set(plan.meaning[phase][1]) <= set(
                states[number]
            ):
                raise AssertionError(f"{phase}: outputs {sorted(outputs)}, states {sorted(new)}")
            for name in outputs:
                count += plan.check(phase, "output", name, outputs[name], bound[name], part)
            for name in new:
                count += plan.check(phase, "state", name, new[name], entry[name], part)
    return count


def _rebuilt(plan: InTerms, value: Any, leaves: Sequence[Array]) -> Any:
    paths = tuple(leaf.path for leaf in value.leaves)
    structure = plan.ways.program.structures.get(paths)
    return nest(paths, leaves) if structure is None else jax.tree_util.tree_unflatten(structure, leaves)


def _cut(grid: Grid, at: tuple[int, ...], value: Any, leaf: Any, whole: Array) -> Array:
    return spread(grid, replace(value, leaves=(leaf,)), [whole])[at][0]


def _own(grid: Grid, value: Any, tree: Any, at: tuple[int, ...]) -> Any:
    pairs, rebuild = flatten(tree)
    parts = zip(pairs, value.leaves, strict=True)
    return rebuild(
        [lift(_cut(grid, at, value, leaf, np.asarray(x)), leaf.dtype.numpy_name) for (_, x), leaf in parts]
    )


def _traced(lowered: Lowered, inputs: Mapping[str, Any], state: Mapping[str, Any], number: int) -> Any:
    """The jaxpr of a phase on one rank, and the shapes of its outputs and states."""

    def body(inputs: Any, state: Any) -> Any:
        structures = {name: flatten_jax(tree)[1] for name, tree in inputs.items()}
        state_structures = {name: flatten_jax(tree)[1] for name, tree in state.items()}
        outputs, new = lowered.run(structures, state_structures, CallContext(np.int32(number)))
        return tuple({name: tree.build() for name, tree in env.items()} for env in (outputs, new))

    entry = {name_of(value.id): value for value in lowered.schedule.entry}
    shaped = [
        {name: _shaped(tree, values[name]) for name, tree in trees.items()}
        for trees, values in ((inputs, lowered.arguments), (state, entry))
    ]
    return jax.make_jaxpr(body, return_shape=True)(*shaped)


def _shaped(tree: Any, value: Any) -> Any:
    pairs, rebuild = flatten(tree)
    leaves = zip(pairs, value.leaves, strict=True)
    return rebuild([jax.ShapeDtypeStruct(np.shape(x), leaf.dtype.numpy_name) for (_, x), leaf in leaves])
