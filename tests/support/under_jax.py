"""Running the phases of a program under JAX on global arrays, partial inputs included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from commplan.lowering.jax.layout import leaf_specs
from commplan.pytree import flatten
from commplan.runtime.context import CALLS

Tree = Any


class UnderJax:
    """A program on a mesh of CPU devices.

    A phase without partial inputs is called from outside; one with them inside a shard_map of the test, with
    a leading dimension for `partial` axes as for `per` ones.
    """

    def __init__(
        self, program: Any, sizes: Mapping[str, int], functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        count = int(np.prod(list(sizes.values())))
        self.mesh = jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=jax.devices()[:count]
        )
        self.schedule = program.schedule
        self.axes = tuple(sizes)
        self.run = program.bind(self.mesh, functions=functions)
        self.counts: dict[str, Any] = {}
        self._mapped: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}  # by phase and layout
        self.entry = {value.id.rpartition(".")[0]: value for value in self.schedule.entry}

    def init(self, call: int = 0) -> dict[str, Tree]:
        """The states before `at start`, and the counts of phases after `call` calls."""
        state = self.run.init()
        self.counts = {name: np.int32(call) for name in state.pop(CALLS, {})}
        return state

    def phase(self, name: str, state: Any, inputs: Mapping[str, Tree]) -> tuple[dict[str, Tree], Any]:
        values = {value.id: value for value in (*self.schedule.entry, *self.schedule.phase(name).values)}
        arguments = self._arguments(name, values)
        if not any(value.placement.partial for value in arguments.values()):
            outputs, new = self.run.phases[name](self._counted(state), **inputs)
            new.pop(CALLS, None)
            return {key: outputs[key] for key in outputs}, new
        return self._inside(name, state, inputs, values, arguments)

    def _counted(self, state: Mapping[str, Tree]) -> dict[str, Tree]:
        return {**state, CALLS: self.counts} if self.counts else dict(state)

    def _arguments(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        phase = self.schedule.phase(name)
        inputs = {ref.rpartition(".")[0]: values[ref] for ref in phase.inputs}
        return inputs | {binding.name: values[binding.value] for binding in phase.takes}

    def _inside(
        self,
        name: str,
        state: Any,
        inputs: Mapping[str, Tree],
        values: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> tuple[dict[str, Tree], Any]:
        states = {ref.rpartition(".")[0]: self.entry[ref.rpartition(".")[0]] for ref in self.schedule.states}
        in_states = self._specs(states, state)
        in_inputs = self._specs(arguments, inputs)
        key = f"{name} {in_states} {in_inputs}"
        if key not in self._mapped:
            self._mapped[key] = self._program(name, values, states, arguments, (in_states, in_inputs))
        mapped, shapes = self._mapped[key]
        answer = mapped(state, dict(inputs))
        trees = {key: shapes[key](leaves) for key, leaves in answer.items()}
        outputs = {key.split(" ", 1)[1]: tree for key, tree in trees.items() if key.startswith("output")}
        new = {key.split(" ", 1)[1]: tree for key, tree in trees.items() if key.startswith("state")}
        return outputs, new

    def _program(
        self,
        name: str,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        arguments: Mapping[str, Any],
        in_specs: tuple[Any, Any],
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """A phase in a shard_map, and the functions that rebuild its results, which tracing fills in."""
        phase = self.schedule.phase(name)
        bound = {b.name: values[b.value] for b in phase.outputs if not b.source_only}
        shapes: dict[str, Any] = {}

        def body(state: Any, inputs: Any) -> Any:
            local = {key: self._strip(tree, arguments[key]) for key, tree in inputs.items()}
            states_of = {key: self._strip(tree, states[key]) for key, tree in state.items()}
            outputs, new = self.run.phases[name](self._counted(states_of), **local)
            new.pop(CALLS, None)
            out = {key: self._lift(outputs[key], bound[key]) for key in outputs}
            back = {key: self._lift(new[key], states[key]) for key in new}
            flat = {}
            for label, trees in (("output", out), ("state", back)):
                for key, tree in trees.items():
                    pairs, shapes[f"{label} {key}"] = flatten(tree)
                    flat[f"{label} {key}"] = [leaf for _, leaf in pairs]
            return flat

        out_specs = {f"output {key}": self._leaf_specs(value) for key, value in bound.items()}
        out_specs |= {f"state {key}": self._leaf_specs(value) for key, value in states.items()}
        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)), shapes

    def _own(self, value: Any) -> list[str]:
        placement = value.placement
        return [axis for axis in self.axes if axis in placement.per or axis in placement.partial]

    def _leaf_specs(self, value: Any) -> list[PartitionSpec]:
        return list(leaf_specs(value))

    def _specs(self, values: Mapping[str, Any], trees: Mapping[str, Tree]) -> dict[str, Tree]:
        """A tree of specs for each value: `per` and `partial` axes lead."""
        specs: dict[str, Tree] = {}
        for name, value in values.items():
            rebuild = flatten(trees[name])[1]
            cut = tuple(value.placement.split)
            specs[name] = rebuild(
                [
                    PartitionSpec(*self._own(value), *((cut,) if cut and leaf.shape else ()))
                    for leaf in value.leaves
                ]
            )
        return specs

    def _strip(self, tree: Tree, value: Any) -> Tree:
        count = len(self._own(value))
        return jax.tree_util.tree_map(lambda x: x.reshape(x.shape[count:]), tree)

    def _lift(self, tree: Tree, value: Any) -> Tree:
        count = len(value.placement.per)
        return jax.tree_util.tree_map(lambda x: x.reshape((1,) * count + x.shape), tree)
