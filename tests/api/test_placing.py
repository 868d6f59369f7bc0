"""Axes said in levels from where ranks run."""

from __future__ import annotations

import pytest
from support.byhand import reduce_plan, tree

from commplan.compile_options import RankPlaces
from commplan.compiler import compile_plan
from commplan.cost.network.rank_placement import spread_as
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis, Collective
from commplan.topology import Level, Topology, places_of_hosts

RACKS = Topology(
    "racks",
    (Level("host", 4, 6e-5, 25e6), Level("rack", 2, 1.2e-4, 25e6)),
    hosts=("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"),
)


def axes(**sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(name, AxisKind.REPLICA, size) for name, size in sizes.items())


def levels(placed: tuple[Axis, ...] | None) -> dict[str, list[tuple[str, int]]] | None:
    if placed is None:
        return None
    return {axis.name: [(spread.level, spread.count) for spread in axis.levels] for axis in placed}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), [("host", 4), ("rack", 2)]),
        ((0, 4, 1, 5, 2, 6, 3, 7), [("rack", 2), ("host", 4)]),
        ((0, 1, 4, 5, 2, 3, 6, 7), None),  # a level in two parts has no name for each
        ((4, 5, 6, 7), [("host", 4)]),
        ((0, 4), [("rack", 2)]),
        ((3,), [("host", 1)]),
        ((0, 2, 1, 3), None),
        ((0, 1, 2, 4), None),
        ((0, 0, 1, 1), None),
        ((7, 6, 5, 4, 3, 2, 1, 0), None),
    ],
)
def test_one_axis(places: tuple[int, ...], expected: list[tuple[str, int]] | None) -> None:
    levels_of_axis = levels(spread_as(axes(data=len(places)), RACKS, places))
    assert levels_of_axis == (None if expected is None else {"data": expected})


def test_two_axes() -> None:
    in_order = spread_as(axes(rack=2, host=4), RACKS, range(8))
    assert levels(in_order) == {"rack": [("rack", 2)], "host": [("host", 4)]}
    dealt = spread_as(axes(data=4, model=2), RACKS, (0, 4, 1, 5, 2, 6, 3, 7))
    assert levels(dealt) == {"data": [("host", 4)], "model": [("rack", 2)]}


def test_places_of_another_number_of_ranks() -> None:
    assert spread_as(axes(data=4), RACKS, (0, 1)) is None


def test_ranks_that_are_dealt_out_to_racks_go_level_by_level() -> None:
    """A ring in rank order would cross the uplinks at every step."""
    plan = reduce_plan("sum", data=8)
    hosts = ("a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3")
    shapes = {"grads": tree(w=(1024**2,))}
    places = places_of_hosts(RACKS, hosts)
    schedule = compile_plan(plan, shapes, topology=RACKS, backend="mpi", ranks=RankPlaces(places))
    assert [spread.level for spread in schedule.axes[0].levels] == ["rack", "host"]
    (op,) = (op for op in schedule.phases[0].ops if isinstance(op, Collective))
    assert [key for key, _ in op.algorithm.levels] == ["host", "rack"]
    assert schedule.hosts == RACKS.hosts
    (choice_of_select,) = (choice for choice in schedule.choices if choice.by == "select")
    slow = next(other for other in choice_of_select.alternatives if other.what == "native")
    assert (slow.seconds or 0) > 2 * (choice_of_select.seconds or 1)


def test_places_that_no_levels_describe_are_priced_as_they_are() -> None:
    plan = reduce_plan("sum", data=4)
    shapes = {"grads": tree(w=(1024,))}
    schedule = compile_plan(plan, shapes, topology=RACKS, backend="mpi", ranks=RankPlaces((0, 1, 2, 4)))
    assert [choice for choice in schedule.choices if choice.by == "select" and choice.seconds]
