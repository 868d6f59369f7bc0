"""Measured costs of the input in a simulation, and which places share a host."""

from __future__ import annotations

import pytest
from support.byhand import ensemble_plan

from commplan.compiler import compile_plan
from commplan.cost import Predictor, predict
from commplan.input.measured_costs import FnCost, InputCosts, SourceCost
from commplan.ir.plan import Algorithm, Arg
from commplan.topology import Level, Topology

COSTS = InputCosts(
    "2026-11-21", 2, 1e-10, source=(SourceCost("images", 1e-3, 8e-3),), fn=(FnCost("decode", 2e-3),)
)
HOST = Topology("one", (Level("process", 4, 1e-6, 1e9),), 2)
HOSTS = Topology("four", (Level("host", 4, 6e-5, 2.4e7),), 2)


def taken(
    topology: Topology, via: Algorithm | None, compute: dict[str, float] | None = None
) -> dict[str, float]:
    """Seconds of each op alone, of 8 records a step and 4 members."""
    schedule = compile_plan(ensemble_plan(via=via), {}, topology=topology)
    time = predict(schedule, Predictor(topology, schedule.axes), compute=compute, measured=COSTS)
    assert "function `augment`" in time.unknown
    assert not any("decode" in name or "images" in name for name in time.unknown)
    return {op.op: op.alone for op in time.phases[0].ops}


@pytest.mark.parametrize(
    ("via", "rows"),
    [(None, 2), (Algorithm("duplicate"), 8), (Algorithm("multi_broadcast", (Arg(2, "readers"),)), 4)],
)
@pytest.mark.parametrize(("topology", "cores"), [(HOST, 0.5), (HOSTS, 2)])
def test_a_process_makes_its_rows_on_its_part_of_the_cores(
    topology: Topology, cores: float, via: Algorithm | None, rows: int
) -> None:
    time = taken(topology, via)
    assert time["decode"] == pytest.approx(rows * 2e-3 / cores)
    assert time["read"] == pytest.approx(rows * (1e-3 / cores + 8e-3 / 8))


def test_what_is_given_overrules_what_was_measured() -> None:
    assert taken(HOST, None, {"decode": 0.5})["decode"] == 0.5


@pytest.mark.parametrize(
    ("levels", "hosts", "places"),
    [
        (("gpu", "node"), (), 8),
        (("host", "rack"), (), 1),
        (("process",), (), 8),
        (("gpu", "pod"), (), 8),
        (("gpu", "rack"), ("a", "b", "c", "d"), 16),
    ],
)
def test_places_of_a_host(levels: tuple[str, ...], hosts: tuple[str, ...], places: int) -> None:
    topology = Topology("t", tuple(Level(name, 8, 1e-6, 1e9) for name in levels), 2, hosts)
    assert topology.host_places == places
