"""Runs phases on NumPy arrays, for all ranks in one process: each value is one tree for each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.ops.fragment import layout_of
from commplan.ir.plan import Ref, name_of
from commplan.ir.stages.builtins import Builtin
from commplan.lowering.builtins import on_leaves
from commplan.lowering.numpy import ops
from commplan.pytree import Rebuild, flatten, nest

Leaves = tuple[ops.Array, ...]
Env = dict[Ref, list[Leaves]]  # the leaves of each value on each rank
Trees = Sequence[Any]  # one tree for each rank, in row-major order over the axes of the plan


@dataclass(frozen=True)
class NumpyRun:
    """Runs the phases of a schedule in this process.

    >>> import commplan
    >>> plan = commplan.loads('''plan sums
    ... axis data = 2
    ... input grads : f32[3] partial data
    ... each step {
    ...     grads = reduce grads over data by mean
    ...     output grads
    ... }''')
    >>> run = NumpyRun(plan.compile().schedule)
    >>> terms = [np.array([1, 2, 3], np.float32), np.array([3, 4, 5], np.float32)]
    >>> run.phase("step", {"grads": terms})[0]["grads"][0]
    array([2., 3., 4.], dtype=float32)

    Attributes:
        schedule: The schedule.
        functions: The device functions of the plan by name, on trees of NumPy arrays, without the built-in
            ones. A function that the plan applies to records is called with one record at a time.
    """

    schedule: ir.Schedule
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Any])
    _structures: dict[tuple[str, ...], Rebuild] = field(
        default_factory=dict[Any, Any], init=False, repr=False
    )

    @property
    def ranks(self) -> int:
        """The number of ranks: the product of the sizes of all axes."""
        return self.schedule.size(tuple(self.schedule.mesh_sizes))

    def phase(
        self, name: str, inputs: Mapping[str, Trees], states: Mapping[str, Trees] | None = None, call: int = 0
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Run a phase.

        Args:
            name: The phase.
            inputs: The inputs that it reads, and the values from sources that it takes, by name: a tree for
                each rank. Shapes and dtypes are not checked.
            states: The states that it reads, by name: a tree for each rank. Missing states are zeros.
            call: The number of calls of the phase before this one, which selects the fragment.

        Returns:
            The outputs, except those from sources alone, and the new states, by name: a tree for each rank.

        Raises:
            CommplanError: CP0817 for an unknown phase, CP0803 if a function is missing, CP0808 for an op or a
                random function that this backend does not run, CP0809 if a function returns other shapes.
        """
        phase, entry = self.schedule.phase(name), {value.id: value for value in self.schedule.entry}
        values = entry | {value.id: value for value in phase.values}
        arguments = {name_of(ref): ref for ref in phase.inputs} | {b.name: b.value for b in phase.takes}
        env: Env = {ref: [self._leaves(tree) for tree in inputs[key]] for key, ref in arguments.items()}
        for ref in phase.states:
            zeros = tuple(np.zeros(leaf.shape, ops.numpy_dtype(leaf.dtype)) for leaf in entry[ref].leaves)
            trees = (states or {}).get(name_of(ref))
            env[ref] = [zeros] * self.ranks if trees is None else [self._leaves(tree) for tree in trees]
        outputs = [binding for binding in phase.outputs if not binding.source_only]
        results = [binding.value for binding in (*outputs, *phase.updates)]
        for op in DefUse(phase.ops).ancestors(results, frozenset(env)):
            env |= self._run(op, values, env, call)
        returned, updated = (
            {b.name: [self._tree(values[b.value], leaves) for leaves in env[b.value]] for b in bindings}
            for bindings in (outputs, phase.updates)
        )
        return returned, updated

    def _run(self, op: ir.Op, values: Mapping[Ref, ir.Value], env: Env, call: int) -> Env:
        """The results of an op on all ranks."""
        if isinstance(op, ir.Collective):
            return {op.result: self._collective(op, values, env)}
        if isinstance(op, ir.Map):
            return self._map(op, values, env)
        if isinstance(op, ir.Pick | ir.Merge):
            return {op.result: [self._fragment(op, values, env, rank, call) for rank in range(self.ranks)]}
        return {ir.results(op)[0]: [self._local(op, values, env, rank) for rank in range(self.ranks)]}

    def _collective(self, op: ir.Collective, values: Mapping[Ref, ir.Value], env: Env) -> list[Leaves]:
        is_array = values[op.operand].kind == "array"
        results: list[list[ops.Array]] = [[] for _ in range(self.ranks)]
        for group in self._groups(op.axes):
            for number, target in enumerate(values[op.result].leaves):
                xs = [env[op.operand][rank][number] for rank in group]
                for rank, x in zip(group, ops.collective(op, xs, target, is_array=is_array), strict=True):
                    results[rank].append(x)
        return [tuple(leaves) for leaves in results]

    def _groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The groups of ranks that communicate along `axes`, row-major with the first axis major."""
        names, sizes = list(self.schedule.mesh_sizes), tuple(self.schedule.mesh_sizes.values())
        grid = np.arange(self.ranks).reshape(sizes)
        order = [name for name in names if name not in axes] + list(axes)
        grid = grid.transpose([names.index(name) for name in order])
        return grid.reshape(-1, self.schedule.size(tuple(axes))).tolist()

    def _local(self, op: ir.Op, values: Mapping[Ref, ir.Value], env: Env, rank: int) -> Leaves:
        """The result of a local op on one rank."""

        def number(factor: Ref | float | None) -> Any:
            return env[factor][rank][0] if isinstance(factor, str) else factor

        match op:
            case ir.Pack():
                sources = (
                    (part, env[part.value][rank][part.leaf], values[part.value].kind) for part in op.parts
                )
                parts = [(part, x, kind in ("array", "records")) for part, x, kind in sources]
                return (ops.pack(op, values[op.result].leaves[0], parts),)
            case ir.Unpack():
                leaves = enumerate(values[op.result].leaves)
                buffers = [(part, env[part.value][rank][0]) for part in op.parts]
                return tuple(
                    ops.unpack(op.ways, leaf, [pair for pair in buffers if pair[0].leaf == index])
                    for index, leaf in leaves
                )
            case ir.Cast():
                pairs = zip(env[op.operand][rank], values[op.result].leaves, strict=True)
                return tuple(x.astype(ops.numpy_dtype(leaf.dtype)) for x, leaf in pairs)
            case ir.LocalSum():
                (x,) = env[op.operand][rank]
                return (np.add.reduce(x.reshape(op.ways, -1), dtype=x.dtype),)
            case ir.Encode():
                return (ops.encode(env[op.operand][rank][0], op),)
            case ir.Decode():
                return (ops.decode(env[op.operand][rank][0], op),)
            case ir.Scale():
                by, over = number(op.by), number(op.over)
                return tuple(ops.scale(x, op.how, by, over) for x in env[op.operand][rank])
            case ir.Slice():
                ways = len(op.owners) or self.schedule.size(op.axes)
                index = next(group.index(rank) for group in self._groups(op.axes) if rank in group)
                if op.owners:  # ranks that own no shard keep the first one
                    index = op.owners.index(index) if index in op.owners else 0
                is_array = values[op.operand].kind == "array"
                return tuple(ops.shard(x, index, ways, is_array=is_array) for x in env[op.operand][rank])
            case ir.Elastic() if op.mode == "sync":
                pairs = zip(env[op.operand][rank], env[op.center][rank], strict=True)
                return tuple(ops.pull(x, center, number(op.eta), number(op.rho)) for x, center in pairs)
            case ir.Update():
                pairs = zip(env[op.operand][rank], env[op.delta][rank], strict=True)
                return tuple((x + delta).astype(x.dtype) for x, delta in pairs)
            case ir.Share():
                return env[op.operand][rank]
            case _:
                message = f"the NumPy backend does not run `{op.title}`"
                note = "it runs synchronous phases; sources and servers have other runtimes"
                return fail("CP0808", message, note, span=op.span, file=self.schedule.file)

    def _fragment(
        self, op: ir.Pick | ir.Merge, values: Mapping[Ref, ir.Value], env: Env, rank: int, call: int
    ) -> Leaves:
        fragment = call % op.fragments
        if isinstance(op, ir.Pick):
            layout = layout_of(op, values[op.operand], self.schedule.size)
            return tuple(ops.pick(x, fragment, layout) for x in env[op.operand][rank])
        layout = layout_of(op, values[op.whole], self.schedule.size)
        pairs = zip(env[op.whole][rank], env[op.piece][rank], strict=True)
        return tuple(ops.merge(x, piece, fragment, layout) for x, piece in pairs)

    def _map(self, op: ir.Map, values: Mapping[Ref, ir.Value], env: Env) -> Env:
        """The results of a function on all ranks. If it is applied to records, their results are stacked."""
        body = self.schedule.fn(op.fn).body
        function = self.functions.get(op.fn) if body is None else functools.partial(_builtin, body)
        if function is None:
            fail("CP0803", f"no function is bound to `{op.fn}`", span=op.span, file=self.schedule.file)
        if op.random:
            message = f"the NumPy backend does not run random functions such as `{op.fn}`"
            fail("CP0808", message, span=op.span, file=self.schedule.file)
        results: Env = {ref: [] for ref in op.results}
        for rank in range(self.ranks):
            leaves = [env[ref][rank] for ref in op.operands]
            is_record = [op.per_record and values[ref].kind == "records" for ref in op.operands]
            count = len(leaves[is_record.index(True)][0]) if op.per_record else 1
            answers: list[list[Leaves]] = [[] for _ in op.results]
            for record in range(count):
                trees = [
                    self._tree(values[ref], tuple(x[record] for x in operand) if picks else operand)
                    for ref, operand, picks in zip(op.operands, leaves, is_record, strict=True)
                ]
                answer = function(*trees)
                for index, tree in enumerate(answer if len(op.results) > 1 else (answer,)):
                    answers[index].append(self._leaves(tree))
            for ref, records in zip(op.results, answers, strict=True):
                stacked = tuple(map(np.stack, zip(*records, strict=True))) if op.per_record else records[0]
                results[ref].append(self._check_leaves(op, values[ref], stacked))
        return results

    def _check_leaves(self, op: ir.Map, value: ir.Value, leaves: Leaves) -> Leaves:
        """The leaves that a function returned for `value`, in the plan's dtypes. Raises CP0809."""
        shapes = [leaf.shape for leaf in value.leaves]
        if [x.shape for x in leaves] != shapes:
            message = f"`{op.fn}` returned the shapes {[x.shape for x in leaves]} for `{name_of(value.id)}`"
            fail("CP0809", f"{message}, expected {shapes}", span=op.span, file=self.schedule.file)
        return tuple(
            x.astype(ops.numpy_dtype(leaf.dtype)) for x, leaf in zip(leaves, value.leaves, strict=True)
        )

    def _leaves(self, tree: Any) -> Leaves:
        """The leaves of a tree. Its structure is stored by leaf paths, for `_tree`."""
        pairs, rebuild = flatten(tree)
        self._structures[tuple(path for path, _ in pairs)] = rebuild
        return tuple(np.asarray(x) for _, x in pairs)

    def _tree(self, value: ir.Value, leaves: Leaves) -> Any:
        """A tree of `leaves`: of the last structure with the paths of `value`, otherwise nested dicts."""
        paths = tuple(leaf.path for leaf in value.leaves)
        rebuild = self._structures.get(paths)
        return rebuild(leaves) if rebuild is not None else nest(paths, leaves)


def _builtin(body: Builtin, *trees: Any) -> Any:
    """The result of a built-in function, or a tuple of results; result i has the structure of operand i."""
    operands = [flatten(tree) for tree in trees]
    leaves = [[np.asarray(x) for _, x in pairs] for pairs, _ in operands]
    with np.errstate(all="ignore"):
        answers = on_leaves(body, leaves, ops.numpy_dtype, np.full)
    results = tuple(rebuild(ys) for (_, rebuild), ys in zip(operands, answers, strict=False))
    return results if body.definition.results > 1 else results[0]
