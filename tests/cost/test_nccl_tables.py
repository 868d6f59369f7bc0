"""`native` on GPUs against published tables of nccl-tests, and properties that NCCL's times have."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import cache

import msgspec
import numpy as np
import pytest

from bench.nccl_tables import Table, cluster, errors, main, ninth, read
from commplan.cost import Calibration, CollectiveQuery, Network, Predictor, collective_time, one_group
from commplan.cost.calibration import Curve, MeasuredLevel
from commplan.cost.collective import nccl
from commplan.cost.collective.cost import CostKind, library_algorithm
from commplan.cost.collective.nccl_model import GPUS
from commplan.cost.network.network import Layout, shape_of
from commplan.ir.plan import Algorithm, AxisKind
from commplan.ir.schedule import Axis
from commplan.topology import DEVICES, Level, Topology, assign_levels

NATIVE = Algorithm("native")
KINDS: tuple[CostKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
SIZES = [2**power for power in range(3, 36)]
MIB = 2**20


@cache
def published() -> tuple[Table, ...]:
    return tuple(read())


def seconds(kind: CostKind, nbytes: float, layout: Layout, topology: Topology, backend: str = "jax") -> float:
    query = CollectiveQuery(kind, layout, nbytes, Network.for_topology(topology), backend)  # pyright: ignore
    prediction = collective_time(NATIVE, query)
    assert prediction is not None
    assert prediction.source == "model"
    return prediction.seconds


def way(nbytes: int, topology: Topology, kind: CostKind = "all_reduce") -> str:
    return library_algorithm(kind, one_group(range(topology.places)), nbytes, Network.for_topology(topology))


# Published tables


def test_the_median_error_of_bus_bandwidth_in_published_tables() -> None:
    relative_errors = errors(published())
    assert len(relative_errors) >= 200
    assert statistics.median(relative_errors) < 0.10
    assert ninth(relative_errors) < 0.30
    unfitted = errors([each for each in published() if not each.fitted])
    assert statistics.median(unfitted) < 0.09
    assert ninth(unfitted) < 0.23


@pytest.mark.parametrize("name", [each.name for each in published()])
def test_the_error_of_each_table(name: str) -> None:
    (table,) = (each for each in published() if each.name == name)
    assert statistics.median(row.error for row in table.rows) < (0.23 if table.fitted else 0.17)
    # Plans are chosen by large messages.
    large = [row.error for row in table.rows if row.nbytes >= 1 << 30]
    assert all(error < 0.25 for error in large)


def test_each_table_has_a_source() -> None:
    assert len({each.name for each in published()}) == len(published())
    for each in published():
        assert each.source.startswith("https://github.com/")
        assert each.hardware


def test_the_table_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows"]) == 0
    printed = capsys.readouterr().out
    assert all(each.name in printed and each.source in printed for each in published())
    assert "all: 228 rows, median error" in printed


# Ways


def test_ways_by_size_and_nodes() -> None:
    single, pair, eight = (cluster("h100", nodes) for nodes in (1, 2, 8))
    assert [way(size, single) for size in (1024, MIB, 2 * MIB, 1024 * MIB)] == [
        *["nccl ring"] * 2,
        *["nccl nvls"] * 2,
    ]
    for topology in (pair, eight):
        assert way(1024, topology) == "nccl tree"
        assert way(1024 * MIB, topology) == "nccl nvls_tree"
        assert way(1024 * MIB, topology, "all_gather") == "nccl ring"
    assert way(1024 * MIB, cluster("a100", 1)) == "nccl ring"
    assert way(1024 * MIB, cluster("a100", 8)) == "nccl ring"
    assert way(1024, cluster("a100", 8)) == "nccl tree"


def test_the_protocol_follows_the_size() -> None:
    layout, network = one_group(range(8)), Network.for_topology(cluster("a100", 1))

    def protocol(nbytes: int) -> str:
        choice = nccl.choose("all_reduce", nbytes, layout, network)
        assert choice is not None
        return choice[0].protocol

    protocols = [protocol(size) for size in SIZES]
    order = ["ll", "ll128", "simple"]
    assert protocols == sorted(protocols, key=order.index)
    assert set(protocols) >= {"ll", "simple"}


# The invariants


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_and_more_nodes_take_no_less_time(kind: CostKind, devices: str) -> None:
    before = [0.0] * len(SIZES)
    for nodes in (1, 2, 3, 4, 8, 16, 64):
        topology = cluster(devices, nodes)
        layout = one_group(range(topology.places))
        times = [seconds(kind, size, layout, topology) for size in SIZES]
        assert all(a <= b for a, b in itertools.pairwise(times))
        assert all(a <= b * (1 + 1e-9) for a, b in zip(before, times, strict=True)), (nodes, before, times)
        before = times


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("nodes", [1, 2, 64])
def test_no_prediction_is_faster_than_the_links(devices: str, nodes: int) -> None:
    topology = cluster(devices, nodes)
    network, layout = Network.for_topology(topology), one_group(range(topology.places))
    for kind, size in itertools.product(KINDS, SIZES):
        chosen = nccl.choose(kind, size, layout, network)
        assert chosen is not None
        choice, load = chosen
        assert choice.seconds(size) >= float((load / network.bandwidths).max())
        predicted = collective_time(NATIVE, CollectiveQuery(kind, layout, size, network))
        assert predicted is not None
        assert predicted.bound <= choice.seconds(size) == predicted.seconds


def test_loads_of_links_are_those_of_the_busiest() -> None:
    topology = cluster("h100", 4)
    network = Network.for_topology(topology)
    columns = Layout(np.arange(32).reshape(4, 8).T.copy())  # one rank of each node
    for layout, kind in itertools.product((one_group(range(32)), columns), KINDS):
        choice = nccl.choose(kind, MIB, layout, network)
        assert choice is not None
        loads = nccl.link_loads(kind, choice[0].algorithm, layout, network)
        assert [max(up.max(), down.max()) * MIB for up, down in loads] == pytest.approx(choice[1].tolist())


def test_groups_that_share_links_share_their_rate() -> None:
    topology = cluster("h100", 2)
    pairs = Layout(np.arange(16).reshape(2, 8).T.copy())
    alone = Layout(np.array([[0, 8]]))
    size = 1024 * MIB
    # Each rank has a separate network card: eight pairs are as fast as one.
    assert seconds("all_reduce", size, pairs, topology) == pytest.approx(
        seconds("all_reduce", size, alone, topology)
    )
    assert seconds("all_reduce", size, alone, topology) > 4 * seconds(
        "all_reduce", size, one_group(range(16)), topology
    )


def test_nodes_of_one_gpu() -> None:
    topology = Topology("single", (Level("node", 4, 6e-6, 50e9),), devices="h100")
    layout = one_group(range(4))
    for kind in KINDS:
        assert seconds(kind, 1024 * MIB, layout, topology) >= 1024 * MIB / 50e9 * 0.75
    assert way(1024, topology, "all_gather") == "nccl ring"
    unnamed = Topology(
        "unnamed", (Level("gpu", 8, 3e-6, 450e9), Level("rack", 2, 6e-6, 400e9)), devices="h100"
    )
    for kind in KINDS:
        assert seconds(kind, 1024 * MIB, one_group(range(16)), unnamed) > 0


# Elsewhere


def test_every_device_of_topologies_is_modeled() -> None:
    assert set(GPUS) == set(DEVICES)


@pytest.mark.parametrize("backend", ["jax", "mpi"])
def test_other_machines_and_open_mpi_keep_their_model(backend: str) -> None:
    gpus = cluster("h100", 2)
    unknown_devices = msgspec.structs.replace(gpus, devices=None)
    layout = one_group(range(16))
    same = seconds("all_reduce", MIB, layout, gpus, backend) == seconds(
        "all_reduce", MIB, layout, unknown_devices, backend
    )
    assert same == (backend == "mpi")
    name = library_algorithm(
        "all_reduce", layout, MIB, Network.for_topology(unknown_devices), backend=backend
    )  # pyright: ignore
    assert not name.startswith("nccl")


def test_ranks_that_lie_unevenly_keep_the_model_of_other_machines() -> None:
    gpus = cluster("h100", 2)
    unknown_devices = msgspec.structs.replace(gpus, devices=None)
    for places in ([0, 1, 8], [0, 1, 2, 8, 9, 10, 11]):
        assert nccl.choose("all_reduce", MIB, one_group(places), Network.for_topology(gpus)) is None
        times = [
            seconds("all_gather", MIB, one_group(places), topology) for topology in (gpus, unknown_devices)
        ]
        assert times[0] == times[1]
    assert nccl.choose("all_to_all", MIB, one_group(range(16)), Network.for_topology(gpus)) is None
    assert nccl.choose("all_reduce", MIB, one_group([3]), Network.for_topology(gpus)) is None


def test_a_measured_curve_goes_first() -> None:
    topology = cluster("h100", 1)
    axes = assign_levels((Axis("data", AxisKind.REPLICA, 8),), topology, {})
    shape = shape_of(one_group(range(8)), Network.for_topology(topology))
    curve = Curve("all_reduce", "native", "call", shape, (1e6,), (5e-3,))
    curves = Calibration(
        "2026-11-26", "jax", tuple("abcdefgh"), 1e-6, 1e-12, 1e-6, 1e-6,
        (MeasuredLevel("gpu", 3e-6, 360e9),), (curve,),
    )  # fmt: skip
    sources = []
    for calibration in (None, curves):
        prediction = Predictor(topology, axes, calibration=calibration).predict(
            "all_reduce", NATIVE, ("data",), 10**6
        )
        assert prediction is not None
        sources.append(prediction.source)
        if calibration is not None:
            assert prediction.seconds == 5e-3
    assert sources == ["model", "measured 2026-11-26"]


def test_what_is_not_measured_is_called_a_guess() -> None:
    topology = cluster("h100", 1)
    axes = assign_levels((Axis("data", AxisKind.REPLICA, 8),), topology, {})
    assert Predictor(topology, axes).in_words("model").startswith("a guess until calibrated")


def test_slower_measured_links_make_it_slower() -> None:
    topology, layout = cluster("h100", 2), one_group(range(16))
    curves = Calibration(
        "2026-11-26", "jax", tuple("abcdefghijklmnop"), 1e-6, 1e-12, 1e-6, 1e-6,
        (MeasuredLevel("gpu", 3e-6, 360e9), MeasuredLevel("node", 20e-6, 100e9)),
    )  # fmt: skip
    measured, file = Network.for_topology(topology, curves), Network.for_topology(topology)
    for size in (1024, 1024 * MIB):
        times = []
        for network in (measured, file):
            prediction = collective_time(NATIVE, CollectiveQuery("all_reduce", layout, size, network))
            assert prediction is not None
            times.append(prediction.seconds)
        assert times[0] > 1.3 * times[1]
        assert math.isfinite(times[0])
