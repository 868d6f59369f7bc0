"""Changed machines: functions from a topology to a topology."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from commplan.cost import Network
from commplan.cost.calibration import Calibration, Curve, MeasuredLevel
from commplan.diagnostics import CommplanError
from commplan.topology import load_topology
from commplan.what_if import scaled, scaled_calibration, with_room

CLUSTER = load_topology(Path(__file__).parents[1] / "examples" / "topologies" / "h100_64.toml")


def test_the_bandwidth_of_a_level_is_scaled_and_nothing_else() -> None:
    slow = scaled(CLUSTER, {"node": Fraction(1, 4)})
    assert [level.bandwidth for level in slow.levels] == [450e9, 100e9]
    assert (slow.name, slow.places, slow.call) == ("h100_64, node x 1/4", 64, CLUSTER.call)
    assert slow.digest != CLUSTER.digest


def test_scaled_links_leave_copies_and_sums_as_they_are() -> None:
    slow = scaled(CLUSTER, {"gpu": Fraction(1, 100)})
    assert Network.for_topology(slow).gamma == Network.for_topology(CLUSTER).gamma
    assert (
        Network.for_topology(scaled(slow, {"gpu": Fraction(1, 100)})).gamma
        == Network.for_topology(CLUSTER).gamma
    )


def test_an_unknown_level_suggests_near_ones() -> None:
    with pytest.raises(CommplanError, match="no level `nod`") as refused:
        scaled(CLUSTER, {"nod": Fraction(2)})
    (diagnostic,) = refused.value.diagnostics
    assert (diagnostic.code, diagnostic.notes[0].text) == ("CP0714", "did you mean `node`?")


def test_curves_are_of_the_links_as_they_were_measured() -> None:
    curve = Curve("all_reduce", "ring", "call", "node 0 1", (4.0,), (1e-3,))
    measured = Calibration(
        "2026-11-21", "jax", ("a",), 0.0, 0.0, 0.0, 0.0, (MeasuredLevel("node", 1e-6, 8e9),), (curve,)
    )
    slow = scaled_calibration(measured, {"node": Fraction(1, 4)})
    assert (slow.levels[0].bandwidth, slow.levels[0].latency, slow.curve_list) == (2e9, 1e-6, ())


@pytest.mark.parametrize(("ranks", "count"), [(8, 8), (64, 8), (65, 9), (256, 32)])
def test_the_outermost_level_grows_for_more_ranks(ranks: int, count: int) -> None:
    larger = with_room(CLUSTER, ranks)
    assert [level.count for level in larger.levels] == [8, count]
    assert (larger == CLUSTER) == (count == 8)
