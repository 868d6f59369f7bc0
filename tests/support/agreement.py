"""Three ways through one plan: its meaning, the oracle's schedule, and the schedule under JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

import commplan
from commplan.ir import schedule as ir
from commplan.pytree import flatten

from .meaning import Array, Judge, Meaning, is_float
from .oracle import Oracle
from .random_case import Case
from .random_machine import make_machine
from .random_stages import Tree

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class DisagreementError(AssertionError):
    """Two ways gave different results."""


def compile_case(case: Case, backend: Literal["jax", "mpi"] | None = None) -> Any:
    """The `Program` of `case`; with a `backend` for a machine that follows from its seed."""
    plan = commplan.loads(case.text, f"random_{case.seed}.plan")
    sizes = {axis.name: case.sizes[axis.name] for axis in plan.graph.axes}
    machine = make_machine(case.seed, list(sizes.values())) if backend else None
    return plan.compile(
        axes=sizes, shapes=case.shapes, order=case.order, passes=case.pipeline,
        topology=machine, backend=backend,
    )  # fmt: skip


def lay_out(leaf: Array, judge: Judge, value: ir.Value, axes: Sequence[str]) -> tuple[Array, Array]:
    """A leaf over all ranks (see `meaning`) in the global layout, and a mask without padding.

    `axes`: the axes with a leading dimension, in plan order.
    """
    rank_dims = len(judge.sizes)
    index = tuple(slice(None) if name in axes else 0 for name in judge.axes)
    lead = tuple(n for name, n in zip(judge.axes, judge.sizes, strict=True) if name in axes)
    wholes = np.asarray(leaf[index]).reshape((math.prod(lead), *leaf.shape[rank_dims:]))
    rows: list[Array] = []
    masks: list[Array] = []
    for whole in wholes:
        row, mask = _cut_up(np.asarray(whole), np.ones(np.shape(whole), bool), judge, value)
        rows.append(row)
        masks.append(mask)
    shape = (*lead, *rows[0].shape)
    return np.stack(rows).reshape(shape), np.stack(masks).reshape(shape)


def _cut_up(whole: Array, mask: Array, judge: Judge, value: ir.Value) -> tuple[Array, Array]:
    """One whole leaf as its cuts one after another, each padded for itself."""
    split = value.placement.split
    if not split or whole.ndim == 0:
        return whole, mask
    pieces = [(whole.reshape(-1), mask.reshape(-1))] if value.kind == "tree" else [(whole, mask)]
    for axis in split:
        ways = judge.sizes[judge.axes.index(axis)]
        smaller: list[tuple[Array, Array]] = []
        for piece, counted in pieces:
            short = -(-len(piece) // ways) * ways - len(piece)
            padding = [(0, short)] + [(0, 0)] * (piece.ndim - 1)
            smaller += zip(
                np.split(np.pad(piece, padding), ways), np.split(np.pad(counted, padding), ways), strict=True
            )
        pieces = smaller
    return np.concatenate([piece for piece, _ in pieces]), np.concatenate([counted for _, counted in pieces])


def same_leaf(label: str, got: Any, expected: Array, mask: Array, epsilon: float) -> None:
    """Raise `DisagreementError` unless equal: bit by bit for integers, within rounding for floats."""
    array = np.asarray(got)
    if array.shape != expected.shape:
        raise DisagreementError(f"{label}: shape {array.shape}, expected {expected.shape}")
    if not is_float(array):
        bad = (array != expected) & mask
    else:
        numbers, target = array.astype(np.float64), expected.astype(np.float64)
        size = np.max(np.abs(target), initial=1.0, where=mask)
        bad = ~(np.abs(numbers - target) <= 16 * epsilon * size) & mask
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DisagreementError(
            f"{label}: {int(bad.sum())} of {bad.size} elements differ, first at {place}:"
            f" {array[place]} instead of {expected[place]}"
        )


def precision(schedule: ir.Schedule) -> dict[str, float]:
    """The rounding that each dtype of a schedule brings: its own, or that of the narrowest wire."""
    wires = [
        EPSILON[leaf.dtype.numpy_name]
        for phase in schedule.phases
        for value in phase.values
        for leaf in value.leaves
        if leaf.dtype.is_float
    ]
    return {name: max([epsilon, *wires]) for name, epsilon in EPSILON.items()}


def values_of(schedule: ir.Schedule, phase: str) -> dict[str, ir.Value]:
    compiled = schedule.phase(phase)
    return {value.id: value for value in (*schedule.entry, *compiled.values)}


def inputs_of(schedule: ir.Schedule, phase: str, inputs: Mapping[str, Tree]) -> dict[str, Tree]:
    """The arguments of `phase`: inputs of the plan, and the loaded values that it takes."""
    compiled = schedule.phase(phase)
    names = [*(ref.rpartition(".")[0] for ref in compiled.inputs), *(b.name for b in compiled.takes)]
    return {name: inputs[name] for name in names}


class Ways:
    """A compiled case and its inputs in the layouts that each way wants."""

    def __init__(self, case: Case, backend: Literal["jax", "mpi"] | None = None) -> None:
        self.case = case
        self.program = compile_case(case, backend)
        self.schedule: ir.Schedule = self.program.schedule
        self.phases = [phase.name for phase in self.schedule.phases]
        graph = commplan.loads(case.text).graph
        self.judge = Judge(graph, case.sizes, case.functions)
        self.entry = {value.id.rpartition(".")[0]: value for value in self.schedule.entry}
        self.meant = {name: self.judge.enter(tree, case.varying[name]) for name, tree in case.inputs.items()}
        self.inputs = {name: self._layout(name) for name in case.inputs}

    def _layout(self, name: str) -> Tree:
        """An input in the global layout; cut leaves padded."""
        pairs, rebuild = flatten(self.case.inputs[name])
        if not self.case.split[name]:
            return self.case.inputs[name]
        value, varying = self.entry[name], self.case.varying[name]
        whole = Judge.enter(self.judge, self.case.inputs[name], varying)
        dtypes = [np.asarray(leaf).dtype for _, leaf in pairs]
        laid = [lay_out(leaf, self.judge, value, varying)[0] for leaf in whole.leaves]
        return rebuild([leaf.astype(dtype) for leaf, dtype in zip(laid, dtypes, strict=True)])

    def oracle(self) -> dict[str, tuple[dict[str, Tree], dict[str, Tree]]]:
        """(outputs, states) of each phase, one after the other."""
        oracle = Oracle(self.schedule, self.case.functions, call=self.case.call)
        state, answers = oracle.init(), {}
        for name in self.phases:
            outputs, state = oracle.phase(name, state, inputs_of(self.schedule, name, self.inputs))
            answers[name] = (outputs, state)
        return answers

    def meaning(self) -> dict[str, tuple[dict[str, Meaning], dict[str, Meaning]]]:
        state: dict[str, Meaning] = {}
        answers: dict[str, tuple[dict[str, Meaning], dict[str, Meaning]]] = {}
        for name in self.phases:
            outputs, state = self.judge.phase(name, state, self.meant, self.case.call)
            answers[name] = (outputs, state)
        return answers

    def check_oracle(self) -> dict[str, tuple[dict[str, Tree], dict[str, Tree]]]:
        """The oracle's results, after checking them against the meaning of the plan."""
        answers, meant, epsilon = self.oracle(), self.meaning(), precision(self.schedule)
        for phase in self.phases:
            values = values_of(self.schedule, phase)
            compiled = self.schedule.phase(phase)
            bound = {b.name: values[b.value] for b in compiled.outputs}
            for name, tree in answers[phase][0].items():
                self._compare(f"{phase}: output {name}", tree, meant[phase][0][name], bound[name], epsilon)
            for name, tree in answers[phase][1].items():
                self._compare(
                    f"{phase}: state {name}", tree, meant[phase][1][name], self.entry[name], epsilon
                )
        return answers

    def _compare(
        self, label: str, tree: Tree, meant: Meaning, value: ir.Value, epsilon: Mapping[str, float]
    ) -> None:
        axes = [name for name in self.judge.axes if name in value.placement.per]
        pairs, _ = flatten(tree)
        for (path, got), leaf in zip(pairs, meant.leaves, strict=True):
            expected, mask = lay_out(leaf, self.judge, value, axes)
            same_leaf(
                f"oracle, {label} {path}", got, expected, mask, epsilon.get(np.asarray(got).dtype.name, 0.0)
            )

    def check_jax(self, answers: Mapping[str, tuple[dict[str, Tree], dict[str, Tree]]]) -> None:
        """JAX equals the oracle, phase by phase, each from the oracle's states."""
        from .under_jax import UnderJax  # noqa: PLC0415 - JAX is loaded only where it is compared

        runner = UnderJax(self.program, self.case.sizes, self.case.functions)
        epsilon = precision(self.schedule)
        state = runner.init(self.case.call)
        for phase in self.phases:
            outputs, state = runner.phase(phase, state, inputs_of(self.schedule, phase, self.inputs))
            wanted_outputs, wanted_state = answers[phase]
            for kind, got, expected in (("output", outputs, wanted_outputs), ("state", state, wanted_state)):
                if set(got) != set(expected):
                    raise DisagreementError(
                        f"JAX, {phase}: {kind}s {sorted(got)}, expected {sorted(expected)}"
                    )
                for name, tree in expected.items():
                    self._equal(f"JAX, {phase}: {kind} {name}", got[name], tree, epsilon)

    def _equal(self, label: str, got: Tree, expected: Tree, epsilon: Mapping[str, float]) -> None:
        ours, theirs = flatten(got)[0], flatten(expected)[0]
        if [path for path, _ in ours] != [path for path, _ in theirs]:
            raise DisagreementError(
                f"{label}: leaves {[p for p, _ in ours]}, expected {[p for p, _ in theirs]}"
            )
        for (path, array), (_, target) in zip(ours, theirs, strict=True):
            mine, right = np.asarray(array), np.asarray(target)
            if mine.dtype != right.dtype:
                raise DisagreementError(f"{label} {path}: dtype {mine.dtype}, expected {right.dtype}")
            same_leaf(
                f"{label} {path}", mine, right, np.ones(right.shape, bool), epsilon.get(mine.dtype.name, 0.0)
            )


def check(case: Case, *, jax: bool, machines: bool = False) -> None:
    """Raise `DisagreementError` (or whatever a bug raises) unless all ways through `case` agree.

    `machines`: the oracle also runs the schedules for a machine, for each backend.
    """
    ways = Ways(case)
    answers = ways.check_oracle()
    if jax:
        ways.check_jax(answers)
    for backend in ("jax", "mpi") if machines else ():
        Ways(case, backend).check_oracle()
