"""Server traffic over time: messages between workers and servers, their links, and the bottleneck."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.byhand import tree

from commplan import dsl
from commplan.cli import main
from commplan.compiler import compile_plan
from commplan.cost import Network, Predictor, predict
from commplan.cost.schedule.requests import RequestTraffic, cost_alone, places_of_servers, request_cost
from commplan.cost.schedule.server_traffic import ElasticTiming, elastic_modes, hidden, least_compute, waiting
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Axis, Schedule, Spread
from commplan.protocol.build_sites import sites
from commplan.topology import Level, Topology

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "examples" / "plans"
RATE = 25e6
FLAT = Topology("flat", (Level("host", 12, 60e-6, RATE),))
RACKS = Topology("racks", (Level("host", 6, 60e-6, RATE), Level("rack", 2, 120e-6, RATE)))
SIZE = 2_500_000  # elements: 10 MB, 0.4 s of a link


def compiled(name: str, topology: Topology = FLAT, mapping: Any = None, **sizes: int) -> Schedule:
    plan, diagnostics = dsl.load((PLANS / f"{name}.plan").read_text(), name)
    assert plan is not None, diagnostics
    axes = tuple(msgspec.structs.replace(a, size=sizes.get(a.name, a.size)) for a in plan.axes)
    plan = msgspec.structs.replace(plan, axes=axes)
    inputs = ("params", "grads")
    shapes = {v.name: tree(w=(SIZE,)) for v in plan.values if str(v.type) == "tree" and v.name in inputs}
    return compile_plan(plan, shapes, topology=topology, mapping=mapping, backend="mpi")


def told(name: str, topology: Topology = FLAT, mapping: Any = None, **sizes: int) -> Any:
    schedule = compiled(name, topology, mapping, **sizes)
    return predict(schedule, Predictor(topology, schedule.axes, backend="mpi"))


def load(nbytes: float, servers: int = 1, units: int = 64, **fields: Any) -> RequestTraffic:
    each, few = np.full(servers, nbytes / servers), np.full(servers, float(units))
    return RequestTraffic(each, each, few, few, units, None, 1, np.zeros(servers), **fields)


def network(topology: Topology = FLAT) -> Network:
    return Network.for_topology(topology)


# Places


@pytest.mark.parametrize(
    ("workers", "count", "places"),
    [
        (range(8), 2, [8, 9]),
        (range(12), 1, [11]),
        (range(12), 2, [10, 11]),
        (range(11), 3, [11, 10, 11]),
        (range(4, 12), 2, [0, 1]),
    ],
)
def test_servers_lie_behind_the_workers_and_on_the_last_places_where_none_is_free(
    workers: range, count: int, places: list[int]
) -> None:
    axes = (Axis("hub", AxisKind.SERVER, count),)
    assert places_of_servers(network(), axes, np.array(workers)).tolist() == places


def test_servers_among_millions_of_places_lie_behind_the_workers() -> None:
    large = network(Topology("large", (Level("host", 2**24, 6e-5, 2.4e7),)))
    axes = (Axis("hub", AxisKind.SERVER, 2),)
    tracemalloc.start()
    assert places_of_servers(large, axes, np.arange(4)).tolist() == [4, 5]
    small = network(Topology("small", (Level("host", 6, 6e-5, 2.4e7),)))
    traffic = RequestTraffic(*(np.ones(2) for _ in range(4)), 1, None, 1, np.zeros(2))
    costs = [request_cost(traffic, np.arange(4), np.array([4, 5]), machine) for machine in (large, small)]
    assert costs[0]._replace(loads=costs[1].loads) == costs[1]
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_servers_that_are_mapped_go_round_the_members_of_their_level() -> None:
    axes = (Axis("hub", AxisKind.SERVER, 3, (Spread("rack", 3),)),)
    assert places_of_servers(network(RACKS), axes, np.array([0, 1, 6, 7])).tolist() == [2, 8, 3]
    assert places_of_servers(network(RACKS), axes, np.arange(12)).tolist() == [5, 11, 5]


def test_the_command_maps_servers_and_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(PLANS / "parameter_hub.plan")
    assert main(["compile", plan, "--map", "hub=rack", "--topology", str(TWO_RACK)]) == 1
    assert "CP0714" in capsys.readouterr().err


TWO_RACK = ROOT / "examples" / "topologies" / "two_rack.toml"

# Time


def test_the_link_of_the_server_takes_every_push_and_every_pull_both_ways_at_once() -> None:
    cost = request_cost(load(10e6), np.arange(8), np.array([8]), network())
    assert cost.bound == pytest.approx(8 * 10e6 / RATE, rel=1e-3)
    assert cost.bound < cost.seconds < 1.03 * cost.bound
    assert cost.loads.tolist() == [80e6]
    assert cost.limit == "links of level host"


def test_a_whole_push_comes_before_the_pull_where_there_is_one_unit() -> None:
    cost = request_cost(load(10e6, units=1), np.arange(8), np.array([8]), network())
    assert cost.seconds == pytest.approx(2 * 8 * 10e6 / RATE, rel=0.01)


def test_more_servers_divide_the_time() -> None:
    single = request_cost(load(10e6), np.arange(8), np.array([8]), network())
    four = request_cost(load(10e6, servers=4, units=16), np.arange(8), np.arange(8, 12), network())
    assert single.seconds / four.seconds == pytest.approx(4, rel=0.1)


def test_a_server_beside_a_worker_shares_its_link() -> None:
    """It sends seven workers their pulls, and the worker of its place pushes to the other server."""
    cost = request_cost(load(10e6, servers=2), np.arange(8), np.array([6, 7]), network())
    assert cost.loads.tolist() == [7 * 5e6 + 5e6]


def test_the_uplink_of_a_rack_carries_what_crosses_it() -> None:
    workers = np.array([0, 1, 2, 3, 6, 7, 8, 9])
    cost = request_cost(load(10e6), workers, np.array([4]), network(RACKS))
    assert cost.loads.tolist() == [80e6, 40e6]


def test_a_stale_answer_waits_for_nothing() -> None:
    traffic = load(10e6, units=4)
    fresh = request_cost(traffic, np.arange(8), np.array([8]), network())
    stale = request_cost(traffic._replace(stale=True), np.arange(8), np.array([8]), network())
    assert stale.seconds < 0.85 * fresh.seconds


def test_one_worker_alone_is_the_one_that_is_furthest_away() -> None:
    near = cost_alone(load(10e6), np.array([0, 1]), np.array([2]), network(RACKS))
    far = cost_alone(load(10e6), np.array([0, 6]), np.array([2]), network(RACKS))
    assert near.seconds == pytest.approx(10e6 / RATE, rel=0.05)
    assert far.loads.tolist() == [10e6, 10e6]
    assert near.loads.tolist() == [10e6, 0]


def test_many_small_messages_are_bound_by_the_server() -> None:
    cost = request_cost(load(1e5, units=10_000), np.arange(8), np.array([8]), network())
    assert cost.limit == "the servers' processors"
    assert cost.busy >= 8 * 20_000 * network().call


# Plans


def test_an_exchange_with_servers_is_charged_on_the_links() -> None:
    prediction = told("parameter_server_dedicated")
    assert prediction.unknown == ()
    (put, exchange) = prediction.server_timings
    assert (put.kind, exchange.kind) == ("put", "exchange")
    assert exchange.places == (8, 9)
    assert exchange.nbytes_up == exchange.nbytes_down == 4 * SIZE
    assert exchange.bound == pytest.approx(8 * 4 * SIZE / 2 / RATE, rel=1e-3)
    assert 1 <= exchange.seconds / exchange.bound < 1.05
    assert exchange.distributions[0].balance < 1.01
    step = next(phase for phase in prediction.phases if phase.name == "step")
    assert step.ops[0].seconds == pytest.approx(exchange.seconds)
    assert dict(step.nbytes)["host"] == pytest.approx(8 * 4 * SIZE / 2, rel=0.01)
    assert put.seconds == pytest.approx(4 * SIZE / RATE, rel=0.01)


@pytest.mark.parametrize("mode", ["round_robin", "async", "hogwild"])
def test_elastic_averaging_on_a_server_is_charged_on_its_link(mode: str) -> None:
    prediction = told(f"easgd_{mode}")
    timing = prediction.server_timings[-1]
    assert (timing.mode, timing.period, timing.workers, timing.places) == (mode, 4, 4, (4,))
    assert timing.alone < timing.seconds
    assert timing.seconds == pytest.approx(4 * 4 * SIZE / RATE, rel=0.05)


def test_a_prime_number_of_workers_that_nobody_could_list_is_simulated() -> None:
    large = Topology("large", (Level("host", 5000, 60e-6, RATE),))
    prediction = told("parameter_server_dedicated", large, worker=4253)
    assert (
        prediction.server_timings[-1].seconds
        >= prediction.server_timings[-1].bound
        == pytest.approx(4253 * 2 * SIZE / RATE, rel=1e-3)
    )


# Modes


def test_modes_are_compared_and_what_waits_is_told_apart_from_what_hides() -> None:
    schedule = compiled("easgd_sync")
    predictor = Predictor(FLAT, schedule.axes, backend="mpi")
    modes = {mode.mode: mode for mode in elastic_modes(predictor, ("worker",), 10e6)}
    assert list(modes) == ["round_robin", "async", "hogwild", "sync"]
    assert modes["sync"].seconds == pytest.approx(2 * 7 / 8 * 0.4, rel=0.1)
    assert modes["round_robin"].seconds == pytest.approx(8 * 0.4, rel=0.05)


def test_shares_of_the_time() -> None:
    turn, free = ElasticTiming("round_robin", 3.0, 0.5, ""), ElasticTiming("async", 3.0, 0.5, "")
    assert waiting(turn, 1.0) == (0.75, 0.75)
    assert waiting(free, 1.0) == (pytest.approx(2 / 3), 0.75)  # the server is never idle: a round is 3 s
    assert waiting(free, 4.5) == (pytest.approx(0.1), pytest.approx(0.4))
    assert hidden(turn, 4.0, 2.0) == pytest.approx(0.2)
    assert hidden(turn, 4.0, 4.0) == 0.0
    for mode in (turn, free):
        assert waiting(mode, least_compute(mode, 0.1))[0] == pytest.approx(0.1)


# The command


@pytest.mark.parametrize("verb", ["simulate", "explain"])
def test_the_command_says_where_states_live_and_what_modes_take(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"params": {"w": {"shape": [250000], "dtype": "f32"}}}')
    flags = ["--shapes", str(shapes), "--topology", str(TWO_RACK), "--backend", "mpi"]
    step = ["--step-seconds", "400ms"] if verb == "simulate" else []
    assert main([verb, str(PLANS / "easgd_async.plan"), *flags, *step]) == 0
    text = capsys.readouterr().out
    assert "`center`: 8 units on 1 server, 977 KiB\n" in text
    assert re.search(r"most of it (on the links of level|in) ", text)
    assert "server on host 0 of rack 1" in text
    assert ">  async" in text
    assert "under a step" in text


def test_explain_offers_what_would_do_without_servers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shapes = tmp_path / "shapes.json"
    tree = '{"w": {"shape": [250000], "dtype": "f32"}}'
    shapes.write_text(f'{{"params": {tree}, "grads": {tree}}}')
    plan = str(PLANS / "parameter_server_dedicated.plan")
    flags = ["--shapes", str(shapes), "--topology", str(TWO_RACK), "--backend", "mpi"]
    assert main(["explain", plan, *flags]) == 0
    text = capsys.readouterr().out
    assert "each worker sends 31 messages of 977 KiB in all and gets 31 messages of 977 KiB in all" in text
    assert "instead: states sharded over the workers: scatter via ring" in text


def test_every_site_of_every_example_has_its_talk() -> None:
    for name in ("parameter_server_dedicated", "easgd_async", "easgd_hogwild", "easgd_round_robin"):
        schedule = compiled(name)
        predictor = Predictor(FLAT, schedule.axes, backend="mpi")
        assert len(predict(schedule, predictor).server_timings) == len(sites(schedule).all)
