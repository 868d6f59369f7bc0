"""Orders of a step's instructions that are found: valid, no worse than its own, no better than the bound."""

from __future__ import annotations

import random

import pytest
from test_audit_bound import MACHINE, copy, reduced, result, step

from commplan.lowering.audit import audit_text, estimate, least_exposed
from commplan.lowering.audit.hlo import read_module
from commplan.lowering.audit.orders import InstructionGraph, best_order


def started(name: str, source: str) -> list[str]:
    start = reduced(f"{name}.s", source).replace("all-reduce(", "all-reduce-start(")
    return [start, f"%{name} = f32[1000]{{0}} all-reduce-done(%{name}.s)"]


def test_what_is_independent_is_put_under_a_collective() -> None:
    def started(name: str, source: str) -> list[str]:
        start = (
            reduced(name, source).replace("all-reduce(", "all-reduce-start(").replace(name, f"{name}.s", 1)
        )
        return [start, f"%{name} = f32[1000]{{0}} all-reduce-done(%{name}.s)"]

    text = step(*started("sum", "x"), copy("used", "sum"), copy("other", "y"), result("used", "other"))
    assert estimate(audit_text(text), MACHINE).exposed == pytest.approx(7)
    order = best_order(text, MACHINE, tries=0)
    assert order.exposed == pytest.approx(0) == least_exposed(text, MACHINE)
    assert [*order.places["main"]] == [0, 1, 2, 5, 3, 4, 6]


@pytest.mark.parametrize("seed", range(5))
def test_orders_keep_dependencies_and_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    lines, names = list[str](), ["x", "y"]
    for number in range(24):
        name, source = f"v{number}", chance.choice(names)
        if chance.random() < 0.4:
            lines += started(name, source)
        else:
            lines.append(copy(name, source))
        names.append(name)
    text = step(*lines, result(*names[2:]))
    order = best_order(text, MACHINE, tries=20)
    own = estimate(audit_text(text), MACHINE)
    assert least_exposed(text, MACHINE) - 1e-9 <= order.exposed <= own.exposed
    assert order.seconds == pytest.approx(own.computation + order.exposed)
    graph = InstructionGraph.from_computation(
        read_module(text).computations["main"], audit_text(text), MACHINE
    )
    for places in graph.orders(3, chance):
        at = {place: index for index, place in enumerate(places)}
        assert sorted(at) == list(range(len(graph.needs)))
        assert all(at[need] < at[place] for place, needs in enumerate(graph.needs) for need in needs)


def test_a_chain_of_what_takes_no_time_may_be_long() -> None:
    chain = [f"%b{n} = f32[1000]{{0}} bitcast(%{f'b{n - 1}' if n else 'x'})" for n in range(2000)]
    text = step(*chain, reduced("sum", "y"), result("sum", "b1999"))
    assert best_order(text, MACHINE, tries=0).seconds == pytest.approx(7)
