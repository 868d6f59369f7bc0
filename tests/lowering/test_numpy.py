"""The NumPy backend: it agrees with the oracle on random plans, and rejects other ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.agreement import Ways, inputs_of, precision, same_leaf, values_of
from support.campaign import parameters
from support.oracle.layout import Grid, collect, spread
from support.random_case import make_case

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir import schedule as ir
from commplan.lowering.numpy import NumpyRun
from commplan.pytree import flatten

pytestmark = pytest.mark.usefixtures("short_search")


def on_ranks(grid: Grid, value: ir.Value, tree: Any) -> list[Any]:
    """One tree for each rank, from a tree in the global layout."""
    pairs, rebuild = flatten(tree)
    leaves = spread(grid, value, [np.asarray(leaf) for _, leaf in pairs])
    return [rebuild(leaves[rank]) for rank in grid.ranks]


def compare(name: str, grid: Grid, value: ir.Value, trees: list[Any], expected: Any, epsilon: Any) -> None:
    leaves = [tuple(leaf for _, leaf in flatten(tree)[0]) for tree in trees]
    collected = collect(grid, value, dict(zip(grid.ranks, leaves, strict=True)))
    for ours, (path, theirs) in zip(collected, flatten(expected)[0], strict=True):
        assert ours.dtype == theirs.dtype, f"{name} {path}"
        same_leaf(
            f"{name} {path}", ours, theirs, np.ones(theirs.shape, bool), epsilon.get(ours.dtype.name, 0)
        )


@pytest.mark.parametrize("block", parameters(range(1), range(1, 5)))
def test_it_agrees_with_the_oracle(block: int) -> None:
    tried = 0
    for seed in range(block * 50, (block + 1) * 50):
        ways = Ways(make_case(seed, builtins=True))
        schedule, grid = ways.schedule, Grid(ways.schedule)
        if any(isinstance(op, ir.Map) and op.random for phase in schedule.phases for op in phase.ops):
            continue
        answers, run = ways.oracle(), NumpyRun(schedule, ways.case.functions)
        states: dict[str, list[Any]] = {}
        for name in ways.phases:
            values, epsilon = values_of(schedule, name), precision(schedule)
            phase = schedule.phase(name)
            arguments = {ref.rpartition(".")[0]: ref for ref in phase.inputs} | {
                b.name: b.value for b in phase.takes
            }
            arguments_of_ranks = {
                each: on_ranks(grid, values[arguments[each]], tree)
                for each, tree in inputs_of(schedule, name, ways.inputs).items()
            }
            outputs, updates = run.phase(name, arguments_of_ranks, states, ways.case.call)
            expected_outputs, expected_states = answers[name]
            assert outputs.keys() == expected_outputs.keys()
            bound = {binding.name: values[binding.value] for binding in phase.outputs}
            for each, trees in outputs.items():
                compare(
                    f"seed {seed}, {name}: {each}", grid, bound[each], trees, expected_outputs[each], epsilon
                )
            for each, trees in updates.items():
                compare(
                    f"seed {seed}, {name}: {each}",
                    grid,
                    ways.entry[each],
                    trees,
                    expected_states[each],
                    epsilon,
                )
            states |= {each: on_ranks(grid, ways.entry[each], tree) for each, tree in expected_states.items()}
        tried += 1
    assert tried > 30


@pytest.mark.parametrize(
    ("declaration", "stage", "code"),
    [
        ("fn f(f32[2]) -> f32[2] on device", "y = map f(x)", "CP0803"),
        ("fn f(f32[2]) -> f32[2] on device random", "y = map f(x)", "CP0808"),
    ],
)
def test_what_it_does_not_run_is_refused(declaration: str, stage: str, code: str) -> None:
    head = f"plan refused\naxis data = 2\ninput x : f32[2]\n{declaration}\n"
    text = f"{head}each step {{\n    {stage}\n    output y\n}}\n"
    functions: Mapping[str, Any] = {} if code == "CP0803" else {"f": np.negative}
    run = NumpyRun(commplan.loads(text).compile().schedule, functions)
    with pytest.raises(CommplanError) as caught:
        run.phase("step", {"x": [np.zeros(2, np.float32)] * 2})
    assert caught.value.diagnostics[0].code == code
