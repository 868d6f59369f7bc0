"""The oracle: a schedule executed in NumPy for all ranks at once. The reference for every lowering."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.pytree import flatten, nest

from . import ops
from .builtins import builtin
from .layout import Grid, Held, Rank, collect, global_shape, spread
from .numbers import Array, convert, storage

Tree = Any
State = dict[str, Tree]


class Oracle:
    """Runs the phases of `schedule`, one rank after the other.

    `functions` are the plan's device functions, as callables on NumPy trees; one that is applied record by
    record takes one record. A random function takes one more argument before the others: a
    `numpy.random.Generator` that depends on (seed, call, place of the op, record, and the members named by
    `per`), so that ranks that must agree do.

    `call` is the number of calls of each phase before the first one, which selects the fragment.

    Arrays are in the global layout: one leading dimension for each `per` and each `partial` axis of the
    value, in plan order; the leading dimension of a `split` leaf is the concatenation of the padded parts;
    nothing is added for `same`. Trees are nested dicts, lists and tuples.

    Raises:
        AssertionError: if a value that should be the same differs between ranks.
        CommplanError: CP0805 and CP0809 if a value, or the result of a function, has another shape than the
            schedule; CP0808 for an op that the oracle does not run; CP0804 for missing or unknown inputs;
            CP0803 for a missing function; CP0817 for an unknown phase.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        seed: int = 0,
        call: int = 0,
    ) -> None:
        self.schedule = schedule
        self.grid = Grid(schedule)
        self._functions = dict(functions or {})
        self._seed = seed
        self._calls = 0
        self._calls_of = Counter({phase.name: call for phase in schedule.phases})
        self._entry = {value.id: value for value in schedule.entry}
        # How to rebuild a tree from its leaves, by the paths of the leaves; learnt from every tree seen.
        self._rebuild: dict[tuple[str, ...], Callable[[Sequence[Any]], Tree]] = {}

    def init(self) -> State:
        """The plan's states before `at start`: zeros, in the global layout."""
        state: State = {}
        for ref in self.schedule.states:
            value = self._entry[ref]
            shapes = [global_shape(self.grid, value, leaf) for leaf in value.leaves]
            zeros = [np.zeros(s, storage(x.dtype)) for s, x in zip(shapes, value.leaves, strict=True)]
            state[name_of(ref)] = self._tree(value, zeros)
        return state

    def phase(self, name: str, state: State, inputs: Mapping[str, Tree]) -> tuple[dict[str, Tree], State]:
        """Run phase `name`: `(outputs, new state)`.

        `inputs` holds, by name, the inputs that the phase reads and the source-only values that it
        takes; outputs that depend on sources alone are not among the results.
        """
        phase = next((p for p in self.schedule.phases if p.name == name), None)
        if phase is None:
            names = ", ".join(p.name for p in self.schedule.phases)
            fail("CP0817", f"the schedule has no phase `{name}`", f"its phases are: {names}")
        values = self._entry | {value.id: value for value in phase.values}
        outputs = tuple(binding for binding in phase.outputs if not binding.source_only)
        refs = {name_of(ref): ref for ref in phase.inputs} | {b.name: b.value for b in phase.takes}
        env = self._enter(refs, inputs, values)
        for ref in phase.states:
            env[ref] = self._spread(values[ref], state[name_of(ref)])
        outputs_of = [binding.value for binding in (*outputs, *phase.updates)]
        for place, op in needed(phase.ops, outputs_of, env):
            env |= self._run(op, values, env, (self._calls, place), self._calls_of[name])
        self._calls += 1
        self._calls_of[name] += 1
        results = {b.name: self._collect(values[b.value], env[b.value]) for b in outputs}
        new = {b.name: self._collect(values[b.value], env[b.value]) for b in phase.updates}
        return results, dict(state) | new

    def _enter(
        self, refs: Mapping[str, str], inputs: Mapping[str, Tree], values: Mapping[str, ir.Value]
    ) -> dict[str, Held]:
        missing = sorted(refs.keys() - inputs.keys())
        if missing:
            fail("CP0804", f"the phase needs a value for {', '.join(f'`{name}`' for name in missing)}")
        unknown = sorted(inputs.keys() - refs.keys())
        if unknown:
            fail("CP0804", f"the phase does not read {', '.join(f'`{name}`' for name in unknown)}",
                 f"it reads: {', '.join(refs) or 'nothing'}")  # fmt: skip
        return {ref: self._spread(values[ref], inputs[name]) for name, ref in refs.items()}

    def _spread(self, value: ir.Value, tree: Tree) -> Held:
        leaves = [
            convert(a, leaf.dtype) for a, leaf in zip(self._leaves(value, tree), value.leaves, strict=True)
        ]
        return spread(self.grid, value, leaves)

    def _collect(self, value: ir.Value, buffers: Held) -> Tree:
        return self._tree(value, collect(self.grid, value, buffers))

    def _leaves(self, value: ir.Value, tree: Tree) -> list[Any]:
        pairs, rebuild = flatten(tree)
        paths = tuple(path for path, _ in pairs)
        expected = tuple(leaf.path for leaf in value.leaves)
        if paths != expected:
            fail("CP0805", f"`{value.id}` has the leaves {list(expected)}, not {list(paths)}")
        self._rebuild[paths] = rebuild
        return [leaf for _, leaf in pairs]

    def _tree(self, value: ir.Value, leaves: Sequence[Array]) -> Tree:
        paths = tuple(leaf.path for leaf in value.leaves)
        rebuild = self._rebuild.get(paths)
        return rebuild(list(leaves)) if rebuild else nest(paths, leaves)

    def _run(
        self, op: ir.Op, values: Mapping[str, ir.Value], env: Mapping[str, Held], place: tuple[int, int],
        number: int,
    ) -> dict[str, Held]:  # fmt: skip
        if isinstance(op, ir.Map):
            return self._map(op, values, env, place)
        if isinstance(op, ir.Share):  # it pins how sameness is made, and changes no value
            return {op.result: env[op.operand]}
        if isinstance(op, ir.Collective):
            return {op.result: ops.collective(op, values, env, self.grid)}
        run = ops.LOCAL.get(type(op))
        if run is None or (isinstance(op, ir.Elastic) and op.mode != "sync"):
            self._refuse(op)
        results = {rank: run(op, ops.View(values, env, self.grid, rank, number)) for rank in self.grid.ranks}
        return {ir.results(op)[0]: results}

    def _refuse(self, op: ir.Op) -> NoReturn:
        if isinstance(op, ir.Read):
            message = (
                f"source `{op.source}` is read by the data runtime: the oracle takes loaded values as inputs"
            )
            fail("CP0808", message, span=op.span, file=self.schedule.file)
        stage = f"elastic by {op.mode}" if isinstance(op, ir.Elastic) else "exchange"
        message = f"`{stage}` needs the exchange runtime: the oracle runs synchronous stages only"
        fail("CP0808", message, span=op.span, file=self.schedule.file)

    def _map(
        self, op: ir.Map, values: Mapping[str, ir.Value], env: Mapping[str, Held], place: tuple[int, int]
    ) -> dict[str, Held]:
        body = {fn.name: fn.body for fn in self.schedule.fns}.get(op.fn)
        function = functools.partial(builtin, body) if body else self._functions.get(op.fn)
        if function is None:
            fail("CP0803", f"no function is bound to `{op.fn}`", span=op.span, file=self.schedule.file)
        outputs: dict[str, Held] = {result: {} for result in op.results}
        for rank in self.grid.ranks:
            key: list[int] | None = None
            if op.random:
                members = [rank[self.grid.names.index(name)] for name in op.per]
                key = [self._seed, *place, zlib.crc32(op.fn.encode()), *members]
            operands = [self._tree(values[ref], env[ref][rank]) for ref in op.operands]
            results = self._apply(op, function, operands, key, rank, values)
            answers: Sequence[Any] = results if len(op.results) > 1 else (results,)
            for ref, answer in zip(op.results, answers, strict=True):
                outputs[ref][rank] = self._checked(op, values[ref], answer)
        return outputs

    def _apply(
        self,
        op: ir.Map,
        function: Callable[..., Any],
        operands: Sequence[Tree],
        key: list[int] | None,
        rank: Rank,
        values: Mapping[str, ir.Value],
    ) -> Any:
        """The result of `function` for one rank's operands; randomness follows the part, not the rank."""
        # Whole values among records go to every record unchanged.
        batched = [op.per_record and values[ref].kind == "records" for ref in op.operands]
        first = values[op.operands[batched.index(True) if op.per_record else 0]] if op.operands else None
        piece = self.grid.position(rank, first.placement.split if first is not None else ())
        if op.per_record and first is not None:
            return by_record(function, operands, batched, key, piece * first.leaves[0].shape[0])
        return call(function, operands, None if key is None else [*key, piece])

    def _checked(self, op: ir.Map, value: ir.Value, answer: Tree) -> tuple[Array, ...]:
        arrays: list[Array] = []
        for leaf, array in zip(value.leaves, self._leaves(value, answer), strict=True):
            if np.shape(array) != leaf.shape:
                message = f"`{op.fn}` made {np.shape(array)} for `{value.id}`, which should be {leaf.shape}"
                fail("CP0809", message, span=op.span, file=self.schedule.file)
            arrays.append(convert(array, leaf.dtype))
        return tuple(arrays)


def call(function: Callable[..., Any], operands: Sequence[Tree], key: list[int] | None) -> Any:
    """`function` on whole values; `key` seeds the generator that a random one takes first."""
    return function(*operands) if key is None else function(np.random.default_rng(key), *operands)


def by_record(
    function: Callable[..., Any],
    operands: Sequence[Tree],
    batched: Sequence[bool],
    key: list[int] | None,
    first: int,
) -> Any:
    """`function` on each record, that is on each index of the leading dimension of the operands that
    are `batched`; results stacked.

    The records are those from `first` of the global batch.
    """
    flat = [flatten(tree) for tree in operands]
    count = len(flat[list(batched).index(True)][0][0][1])
    answers: list[Any] = []
    for record in range(count):
        result = [
            rebuild([leaf[record] if split else leaf for _, leaf in pairs])
            for (pairs, rebuild), split in zip(flat, batched, strict=True)
        ]
        answers.append(call(function, result, None if key is None else [*key, first + record]))
    stacked = [flatten(answer) for answer in answers]
    columns = zip(*([leaf for _, leaf in pairs] for pairs, _ in stacked), strict=True)
    return stacked[0][1]([np.stack(column) for column in columns])


def needed(
    sequence: Iterable[ir.Op], targets: Iterable[str], available: Iterable[str]
) -> list[tuple[int, ir.Op]]:
    """The ops that `targets` depends on, with their indices; without the producers of the values in
    `available`."""
    available = set(available)
    missing = set(targets) - available
    chosen: list[tuple[int, ir.Op]] = []
    for place, op in reversed(list(enumerate(sequence))):
        if missing.isdisjoint(ir.results(op)):
            continue
        chosen.append((place, op))
        missing |= set(ir.operands(op)) - available
    return chosen[::-1]
