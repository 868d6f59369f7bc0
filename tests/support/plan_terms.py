"""A compiled plan on terms: its inputs as unknowns, its meaning, and the roundings of its schedule.

The meaning comes from the plan's graph (`meaning`), and is exact. The oracle executes the schedule's ops on
terms, which gives the roundings of each element.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

import commplan
from commplan.ir import plan as graph
from commplan.pytree import flatten

from . import terms
from .agreement import Ways, lay_out
from .jaxpr_terms import opaque, unknown
from .meaning import Judge, Meaning
from .oracle import numbers, ops, programs, run
from .random_case import Case
from .terms import Array

Tree = Any


class TermJudge(Judge):
    """`meaning.Judge` on arrays of exact terms, which have no order: an extreme is one of its members. An
    exchange is a mean and a map: the result if the workers keep the states."""

    def stage(self, stage: graph.Stage, env: Mapping[str, Meaning], number: int = 0) -> dict[str, Meaning]:
        if not isinstance(stage, graph.ExchangeStage):
            return super().stage(stage, env, number)
        total = self._reduce(env, stage.gradient, stage.axes, stage.op)
        columns = list(zip(*(env[ref].leaves for ref in stage.states), total.leaves, strict=True))
        return {
            ref: total.with_leaves([unknown(f"{stage.fn}.{number}", column) for column in columns])
            for number, ref in enumerate(stage.results)
        }

    def _reduce(
        self,
        env: Mapping[str, Meaning],
        operand: str,
        over: Sequence[str],
        op: Any,
        integers: str | None = None,
    ) -> Meaning:
        if op.name not in ("max", "min"):
            return super()._reduce(env, operand, over, op, integers)
        value, dims = env[operand], self._dims(over)
        leaves: list[Array] = []
        for leaf in value.leaves:
            leaves.append(self._all(np.expand_dims(terms.fold_along(op.name, terms.lift(leaf), dims), dims)))
        return value.with_leaves(leaves)


@contextlib.contextmanager
def oracle_on_terms() -> Generator[None]:
    """The oracle with arithmetic on terms in place of NumPy's."""

    def convert(array: Any, dtype: Any) -> Array:
        name, values = dtype.numpy_name, np.asarray(array)
        lifted = terms.lift(values, None if terms.is_known(values) else name)
        return terms.each(lambda x: terms.cast(x, name), lifted)

    def combine(op: str, first: Array, second: Array, dtype: Any) -> Array:
        return terms.fold(op, [convert(first, dtype), convert(second, dtype)])

    def multiply(array: Array, factor: Any, dtype: Any) -> Array:
        wide = numbers.wide(dtype)
        return convert(np.multiply(convert(array, wide), convert(factor, wide)), dtype)

    def divide(array: Array, divisor: Any, dtype: Any) -> Array:
        wide = dtype if numbers.holds(dtype, divisor) else numbers.wide(dtype)
        return convert(np.divide(convert(array, wide), convert(divisor, wide)), dtype)

    def storage(dtype: Any) -> Any:
        return np.dtype(object) if dtype else dtype

    replacements = {
        "convert": convert,
        "combine": combine,
        "multiply": multiply,
        "divide": divide,
        "storage": storage,
    }
    with contextlib.ExitStack() as stack:
        for module in (numbers, ops, programs, run):
            for name, function in replacements.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, function))
        yield


class InTerms:
    """A compiled case, its inputs as unknowns, and the expected results, phase by phase."""

    def __init__(self, case: Case, backend: Any = None) -> None:
        terms.forget()
        declared = {fn.name: fn for fn in commplan.loads(case.text).graph.fns}
        if any(fn.where == "device" and not fn.elementwise for fn in declared.values()):
            raise NotImplementedError("terms stand for elementwise functions")
        functions = {
            name: opaque(name, len(declared[name].results), linear=declared[name].linear)
            if declared[name].where == "device"
            else function
            for name, function in case.functions.items()
        }
        self.case = dataclasses.replace(case, functions=functions)
        unknown = {name: self._unknowns(name, tree) for name, tree in case.inputs.items()}
        exact = {
            name: _each_leaf(lambda x: terms.retyped(x, terms.EXACT), tree) for name, tree in unknown.items()
        }
        self.ways = Ways(self.case, backend)
        self.schedule = self.ways.schedule
        self.judge = TermJudge(self.ways.judge.plan, case.sizes, functions)
        self.meant = {name: self.judge.enter(tree, case.varying[name]) for name, tree in exact.items()}
        ways = self.ways
        ways.case, ways.judge = dataclasses.replace(self.case, inputs=unknown), self.judge
        ways.inputs = {name: self._laid_out(name, tree) for name, tree in unknown.items()}
        self.inputs = ways.inputs
        ways.meant = self.meant
        with oracle_on_terms():
            self.rounded = ways.oracle()
        self.meaning = ways.meaning()

    def _unknowns(self, name: str, tree: Tree) -> Tree:
        pairs, rebuild = flatten(tree)
        return rebuild(
            [
                terms.symbols(f"{name}{'.' if path else ''}{path}", np.shape(x), np.asarray(x).dtype.name)
                for path, x in pairs
            ]
        )

    def _laid_out(self, name: str, tree: Tree) -> Tree:
        """An input in the global layout; cut leaves padded."""
        if not self.case.split[name]:
            return tree
        value, varying = self.ways.entry[name], self.case.varying[name]
        rebuild = flatten(tree)[1]
        dtypes = [leaf.dtype.numpy_name for leaf in value.leaves]
        whole = self.judge.enter(tree, varying)
        laid = [lay_out(leaf, self.judge, value, varying)[0] for leaf in whole.leaves]
        return rebuild([terms.lift(leaf, dtype) for leaf, dtype in zip(laid, dtypes, strict=True)])

    def check(self, phase: str, kind: str, name: str, tree: Tree, value: Any, how: Any = None) -> int:
        """Check that `tree`, output or state `name` after `phase`, is the plan's result, with the schedule's
        roundings.

        Raises AssertionError otherwise; returns the number of compared elements. `how` selects the compared
        part of an array in the global layout; None compares all of it.
        """
        place = ("output", "state").index(kind)
        meant, rounded = self.meaning[phase][place][name], self.rounded[phase][place][name]
        axes = [axis for axis in self.judge.axes if axis in value.placement.per]
        count = 0
        triples = zip(flatten(tree)[0], meant.leaves, flatten(rounded)[0], value.leaves, strict=True)
        for (path, got), exact, (_, rough), leaf in triples:
            expected, mask = lay_out(terms.lift(exact), self.judge, value, axes)
            dtype = leaf.dtype.numpy_name
            marked = rough
            if how is not None:
                expected, mask, marked = (how(value, leaf, each) for each in (expected, mask, rough))
            label = f"{phase}: {kind} {name} {path}".rstrip()
            count += _same(label, got, expected, mask, marked, dtype)
        return count


def _same(label: str, got: Array, expected: Array, mask: Array, marked: Array, dtype: str) -> int:
    got, marked = terms.lift(np.asarray(got), dtype), terms.lift(np.asarray(marked), dtype)
    expected = terms.lift(np.asarray(expected), terms.EXACT)
    if not got.shape == expected.shape == marked.shape:
        raise AssertionError(f"{label}: shapes {got.shape}, {expected.shape}, {marked.shape}")
    for place in map(tuple, np.argwhere(mask)):
        mine, exact, roundings = got[place], expected[place], marked[place]
        where = f"{label} {[int(i) for i in place]}"
        if mine.key != exact.key:
            raise AssertionError(f"{where}: {mine}, and the plan means {exact}")
        if (mine.dtype, mine.marks) != (dtype, roundings.marks):
            raise AssertionError(f"{where}: {mine}, and the schedule makes {roundings}")
    return int(mask.sum())


def _each_leaf(function: Any, tree: Tree) -> Tree:
    pairs, rebuild = flatten(tree)
    return rebuild([function(leaf) for _, leaf in pairs])
